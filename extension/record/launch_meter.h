#pragma once

namespace oomdiag {

/// Meters kernels that no operator of PyTorch launches, as those of torch.compile, Triton and CuPy, on the virtual device: by what their PTX
/// says that they read and write of each tensor. Call it with start_work_meter, before the program compiles any.
void start_launch_meter();

}  // namespace oomdiag
