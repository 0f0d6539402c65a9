#pragma once

namespace oomdiag {

/// Polls at every op until recording begins: for a recorder that the program loaded itself, without the preloaded shim.
void wait_in_ops();

/// Counts optimizer steps, by the scopes that PyTorch opens around them, and begins to record when step `first` begins. Ops
/// cost nothing meanwhile.
void wait_for_step(int first);

}  // namespace oomdiag
