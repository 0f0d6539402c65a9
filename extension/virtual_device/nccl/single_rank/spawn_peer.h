#pragma once

namespace oomdiag {

/// Has `rank` of the job run, unless it does: starts this process's own command once more as that rank, with the environment
/// that it began with and unrecorded, and says so on stderr. False if it cannot be started.
bool spawn_peer(int rank);

}  // namespace oomdiag
