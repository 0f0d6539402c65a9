// cuBLAS. Products are not computed; what a program reads back on the host is: settings of a handle, and results that
// are written to host memory, as zeros. Every create call gives a *new* handle: PyTorch keys its workspaces by (handle,
// stream), and the backward thread has a handle of its own, so that with one shared handle the second workspace would
// be missing.

#include <cublas_v2.h>

#include <cstring>
#include <memory>

#include "extension/virtual_device/blas/handle.h"
#include "extension/virtual_device/driver/device.h"

using oomdiag::find_handle;

namespace {

cublasStatus_t submit(cublasHandle_t handle) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  const CUresult error = oomdiag_device_submit(find_handle(handle)->stream, CU_GRAPH_NODE_TYPE_KERNEL);
  return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

/// A result of `bytes` bytes: the program reads it where it wants it, on the host (zeros) or on the device
/// (contents.cpp).
cublasStatus_t give_zeros(cublasHandle_t handle, void* result, size_t bytes) {
  if (const cublasStatus_t error = submit(handle)) return error;
  if (find_handle(handle)->pointer_mode == CUBLAS_POINTER_MODE_HOST) std::memset(result, 0, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

size_t element_bytes(cudaDataType type) {
  switch (static_cast<int>(type)) {
    case CUDA_C_64F:
      return 16;
    case CUDA_R_64F:
    case CUDA_C_32F:
      return 8;
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    default:
      return 4;
  }
}

}  // namespace

/// What every generated stub of this library does: by name, or, for those that only compute, in silence.
extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return CUBLAS_STATUS_NOT_SUPPORTED;
}
extern "C" int oomdiag_compute(void* handle) { return submit(static_cast<cublasHandle_t>(handle)); }

OOMDIAG_ENTRY_POINT cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  cudaFree(nullptr);  // makes the context, as the real one does
  if (oomdiag_device_use_library()) return CUBLAS_STATUS_NOT_INITIALIZED;
  auto made = std::make_unique<oomdiag::BlasHandle>();
  if (oomdiag::allocate_workspace(*made)) return CUBLAS_STATUS_ALLOC_FAILED;
  *handle = reinterpret_cast<cublasHandle_t>(made.release());
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  if (handle && find_handle(handle)->workspace) cuMemFree(find_handle(handle)->workspace);
  delete find_handle(handle);
  return CUBLAS_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  find_handle(handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
  *stream = find_handle(handle)->stream;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  find_handle(handle)->math_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = find_handle(handle)->math_mode;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  find_handle(handle)->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = find_handle(handle)->pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t mode) {
  find_handle(handle)->atomics_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasGetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t* mode) {
  *mode = find_handle(handle)->atomics_mode;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int multiprocessors) {
  find_handle(handle)->multiprocessors = multiprocessors;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasGetSmCountTarget(cublasHandle_t handle, int* multiprocessors) {
  *multiprocessors = find_handle(handle)->multiprocessors;
  return CUBLAS_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* version) {
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT size_t cublasGetCudartVersion() { return CUDART_VERSION; }
OOMDIAG_ENTRY_POINT const char* cublasGetStatusString(cublasStatus_t status) {
  return status ? "virtual cuBLAS: not supported" : "success";
}
OOMDIAG_ENTRY_POINT const char* cublasGetStatusName(cublasStatus_t status) {
  return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS";
}

// Results on the host. The shapes are cublas_api.h's: two vectors for dot products, one for norms, sums and extremes.
#define OOMDIAG_DOT(name, type)                                                                           \
  OOMDIAG_ENTRY_POINT cublasStatus_t name(cublasHandle_t handle, int, const type*, int, const type*, int, \
                                          type* result) {                                                 \
    return give_zeros(handle, result, sizeof *result);                                                    \
  }
#define OOMDIAG_REDUCTION(name, type, result_type)                                                             \
  OOMDIAG_ENTRY_POINT cublasStatus_t name(cublasHandle_t handle, int, const type*, int, result_type* result) { \
    return give_zeros(handle, result, sizeof *result);                                                         \
  }
OOMDIAG_DOT(cublasSdot_v2, float)
OOMDIAG_DOT(cublasDdot_v2, double)
OOMDIAG_DOT(cublasCdotu_v2, cuComplex)
OOMDIAG_DOT(cublasCdotc_v2, cuComplex)
OOMDIAG_DOT(cublasZdotu_v2, cuDoubleComplex)
OOMDIAG_DOT(cublasZdotc_v2, cuDoubleComplex)
OOMDIAG_REDUCTION(cublasSnrm2_v2, float, float)
OOMDIAG_REDUCTION(cublasDnrm2_v2, double, double)
OOMDIAG_REDUCTION(cublasScnrm2_v2, cuComplex, float)
OOMDIAG_REDUCTION(cublasDznrm2_v2, cuDoubleComplex, double)
OOMDIAG_REDUCTION(cublasSasum_v2, float, float)
OOMDIAG_REDUCTION(cublasDasum_v2, double, double)
OOMDIAG_REDUCTION(cublasScasum_v2, cuComplex, float)
OOMDIAG_REDUCTION(cublasDzasum_v2, cuDoubleComplex, double)
OOMDIAG_REDUCTION(cublasIsamax_v2, float, int)
OOMDIAG_REDUCTION(cublasIdamax_v2, double, int)
OOMDIAG_REDUCTION(cublasIcamax_v2, cuComplex, int)
OOMDIAG_REDUCTION(cublasIzamax_v2, cuDoubleComplex, int)
OOMDIAG_REDUCTION(cublasIsamin_v2, float, int)
OOMDIAG_REDUCTION(cublasIdamin_v2, double, int)
OOMDIAG_REDUCTION(cublasIcamin_v2, cuComplex, int)
OOMDIAG_REDUCTION(cublasIzamin_v2, cuDoubleComplex, int)

OOMDIAG_ENTRY_POINT cublasStatus_t cublasDotEx(cublasHandle_t handle, int, const void*, cudaDataType, int, const void*,
                                               cudaDataType, int, void* result, cudaDataType type, cudaDataType) {
  return give_zeros(handle, result, element_bytes(type));
}

// Batched factorisations whose `info`, one number, is the host's.
#define OOMDIAG_GEQRF(name, type)                                                                             \
  OOMDIAG_ENTRY_POINT cublasStatus_t name(cublasHandle_t handle, int, int, type* const[], int, type* const[], \
                                          int* info, int) {                                                   \
    *info = 0;                                                                                                \
    return submit(handle);                                                                                    \
  }
#define OOMDIAG_GELS(name, type)                                                                                       \
  OOMDIAG_ENTRY_POINT cublasStatus_t name(cublasHandle_t handle, cublasOperation_t, int, int, int, type* const[], int, \
                                          type* const[], int, int* info, int*, int) {                                  \
    *info = 0;                                                                                                         \
    return submit(handle);                                                                                             \
  }
OOMDIAG_GEQRF(cublasSgeqrfBatched, float)
OOMDIAG_GEQRF(cublasDgeqrfBatched, double)
OOMDIAG_GEQRF(cublasCgeqrfBatched, cuComplex)
OOMDIAG_GEQRF(cublasZgeqrfBatched, cuDoubleComplex)
OOMDIAG_GELS(cublasSgelsBatched, float)
OOMDIAG_GELS(cublasDgelsBatched, double)
OOMDIAG_GELS(cublasCgelsBatched, cuComplex)
OOMDIAG_GELS(cublasZgelsBatched, cuDoubleComplex)
