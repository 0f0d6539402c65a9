#pragma once

#include <string>

namespace oomdiag {

/// Starts this process's own command once more as `rank` of its job, with the environment that it began with, in
/// `rank_file` its process id and in `output` what it prints. Says so on stderr. Another process that has begun to start
/// it is as good. False if it cannot be started.
bool start_rank(int rank, const std::string& rank_file, const std::string& output);

}  // namespace oomdiag
