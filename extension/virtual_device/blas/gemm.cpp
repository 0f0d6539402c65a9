// Matrix products, as far as PyTorch calls them: their sizes say how long they take where work takes time
// (driver/clock.h). All others are stubs that take the time of a short kernel.

#include <cublas_v2.h>

#include "extension/virtual_device/blas/handle.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"

namespace {

cublasStatus_t multiply(cublasHandle_t handle, int m, int n, int k, int batch, cudaDataType type) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  const CUresult error =
      oomdiag_device_compute(oomdiag::find_handle(handle)->stream, 0, oomdiag::count_flops(m, n, k, batch, type));
  return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

}  // namespace

#define OOMDIAG_GEMM(name, element, type)                                                                            \
  OOMDIAG_ENTRY_POINT cublasStatus_t name(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, \
                                          int k, const element*, const element*, int, const element*, int,           \
                                          const element*, element*, int) {                                           \
    return multiply(handle, m, n, k, 1, type);                                                                       \
  }
#define OOMDIAG_BATCHED_GEMM(name, element, type)                                                                     \
  OOMDIAG_ENTRY_POINT cublasStatus_t name(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n,  \
                                          int k, const element*, const element*, int, long long, const element*, int, \
                                          long long, const element*, element*, int, long long, int batch) {           \
    return multiply(handle, m, n, k, batch, type);                                                                    \
  }
OOMDIAG_GEMM(cublasSgemm_v2, float, CUDA_R_32F)
OOMDIAG_GEMM(cublasDgemm_v2, double, CUDA_R_64F)
OOMDIAG_GEMM(cublasCgemm_v2, cuComplex, CUDA_C_32F)
OOMDIAG_GEMM(cublasZgemm_v2, cuDoubleComplex, CUDA_C_64F)
OOMDIAG_BATCHED_GEMM(cublasSgemmStridedBatched, float, CUDA_R_32F)
OOMDIAG_BATCHED_GEMM(cublasDgemmStridedBatched, double, CUDA_R_64F)
OOMDIAG_BATCHED_GEMM(cublasCgemmStridedBatched, cuComplex, CUDA_C_32F)
OOMDIAG_BATCHED_GEMM(cublasZgemmStridedBatched, cuDoubleComplex, CUDA_C_64F)

OOMDIAG_ENTRY_POINT cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                                                int n, int k, const void*, const void*, cudaDataType type, int,
                                                const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                                                cublasComputeType_t, cublasGemmAlgo_t) {
  return multiply(handle, m, n, k, 1, type);
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m,
                                                 int n, int k, const float*, const void*, cudaDataType type, int,
                                                 const void*, cudaDataType, int, const float*, void*, cudaDataType,
                                                 int) {
  return multiply(handle, m, n, k, 1, type);
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t,
                                                              cublasOperation_t, int m, int n, int k, const void*,
                                                              const void*, cudaDataType type, int, long long,
                                                              const void*, cudaDataType, int, long long, const void*,
                                                              void*, cudaDataType, int, long long, int batch,
                                                              cublasComputeType_t, cublasGemmAlgo_t) {
  return multiply(handle, m, n, k, batch, type);
}
