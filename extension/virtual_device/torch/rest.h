#pragma once

namespace oomdiag {

/// From torch 2.13 on a Python program aborts now and then when it ends while a thread of the autograd engine is still on its
/// way to rest after the last backward: that thread asks for the GIL of an interpreter that is ending (pytorch/pytorch issue
/// 190489). Kernels take no time here, so that happens far more often than on a GPU: Python's end waits until they rest.
void rest_before_interpreter_shutdown() noexcept;

}  // namespace oomdiag
