#pragma once

#include "extension/virtual_device/blas/handle.h"
#include "extension/virtual_device/stubs/answers.h"
#include "extension/virtual_device/stubs/handle.h"

namespace oomdiag {

/// A result of one number.
template <typename Number>
cublasStatus_t zero(cublasHandle_t handle, Number* result) {
  return give_zeros(handle, result, sizeof *result);
}

/// What work that was submitted, or not, answers.
inline cublasStatus_t executed(CUresult error) {
  return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

/// A matrix product, of whose factors the first has this type: its sizes say how long it takes where work takes time
/// (driver/clock.h).
inline cublasStatus_t multiply(cublasHandle_t handle, int m, int n, int k, int batch, cudaDataType type) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return executed(oomdiag_device_compute(find_handle(handle)->stream, 0, count_flops(m, n, k, batch, type)));
}

/// A batched factorisation, whose `info`, one number, is the host's.
inline cublasStatus_t factorize(cublasHandle_t handle, int* info) {
  *info = 0;
  return submit(handle);
}

/// What cuBLASLt keeps of a matrix: how long a product takes follows from it.
struct LtLayout {
  cudaDataType type = CUDA_R_32F;
  double rows = 0;
  double columns = 0;
  int32_t batch = 1;
};

/// What a program wants of an algorithm of cuBLASLt.
struct LtPreference {
  uint64_t workspace_bytes = 0;  ///< at most; none, where it was not said
};

}  // namespace oomdiag
