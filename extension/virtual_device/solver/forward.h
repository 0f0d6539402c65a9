#pragma once

#include "extension/virtual_device/solver/answers.h"
#include "extension/virtual_device/stubs/handle.h"

namespace oomdiag {

struct SolverHandle {
  cudaStream_t stream = nullptr;
};

}  // namespace oomdiag
