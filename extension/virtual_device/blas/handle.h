#pragma once

#include <cublas_v2.h>
#include <cuda.h>

namespace oomdiag {

/// What a handle of cuBLAS points at.
struct BlasHandle {
  cudaStream_t stream = nullptr;
  cublasMath_t math_mode = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
  cublasAtomicsMode_t atomics_mode = CUBLAS_ATOMICS_NOT_ALLOWED;
  int multiprocessors = 0;
  CUdeviceptr workspace = 0;  ///< its own, whatever the program gives it
};

/// A kernel on the stream of a handle.
cublasStatus_t submit(cublasHandle_t handle);

/// A result of `bytes` bytes: the program reads it where it wants it, on the host (zeros) or on the device (contents.cpp).
cublasStatus_t give_zeros(cublasHandle_t handle, void* result, size_t bytes);

inline BlasHandle* find_handle(cublasHandle_t handle) { return reinterpret_cast<BlasHandle*>(handle); }

/// The workspace that cuBLAS gives each handle. What a GPU's data file says of the first kernels includes that of the first
/// handle. Made on the current device.
CUresult allocate_workspace(BlasHandle& handle);

/// Operations in 32 bits of `batch` products [m, k] x [k, n]: half precision runs on tensor cores, by the CUDA programming
/// guide's tables eight times as fast.
inline double count_flops(double m, double n, double k, double batch, cudaDataType type) {
  const bool is_half = type == CUDA_R_16F || type == CUDA_R_16BF || type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
  return 2 * m * n * k * batch / (is_half ? 8 : 1);
}

}  // namespace oomdiag
