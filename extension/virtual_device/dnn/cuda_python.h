#pragma once

namespace oomdiag {

/// Whether that file is cuda-python's module of the CUDA runtime.
bool is_cuda_python_runtime(const char* file) noexcept;

/// Makes cuda-python call the virtual runtime. Before the file above is opened, by a thread that imports it.
void redirect_cuda_python() noexcept;

}  // namespace oomdiag
