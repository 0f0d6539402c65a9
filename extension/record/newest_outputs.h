#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

namespace oomdiag {

/// Remembers the tensors among `outputs` that have a grad_fn, weakly: an OOM in forward has no graph task, but what these
/// tensors can reach is the graph so far. This thread's only. A weak reference lets go of the storage and the graph of a
/// dead tensor; what stays is its empty TensorImpl, at most some hundreds of them per thread.
void remember_outputs(const std::vector<c10::IValue>& outputs);

/// Those of them that are still alive, newest first.
std::vector<at::Tensor> living_outputs();

}  // namespace oomdiag
