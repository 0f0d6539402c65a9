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

/// Copies `width` bytes of each of `count` rows, which begin so many bytes apart, between the host and the GPU (copies.cpp).
cublasStatus_t copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t count,
                         cudaStream_t stream, bool waits);

/// A vector, whose elements are rows.
inline cublasStatus_t copy_vector(int64_t count, int64_t bytes, const void* from, int64_t from_step, void* to,
                                  int64_t to_step, cudaStream_t stream, bool waits) {
  return copy_rows(to, to_step * bytes, from, from_step * bytes, bytes, count, stream, waits);
}

/// A matrix, whose columns are rows here.
inline cublasStatus_t copy_matrix(int64_t rows, int64_t columns, int64_t bytes, const void* from, int64_t from_rows,
                                  void* to, int64_t to_rows, cudaStream_t stream, bool waits) {
  return copy_rows(to, to_rows * bytes, from, from_rows * bytes, rows * bytes, columns, stream, waits);
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
