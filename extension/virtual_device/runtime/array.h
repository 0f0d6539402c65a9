#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace oomdiag {

/// A cudaArray_t is a CUarray.
inline CUarray driver_array(cudaArray_const_t array) {
  return reinterpret_cast<CUarray>(const_cast<cudaArray_t>(array));
}

}  // namespace oomdiag
