// cuBLAS. Products are not computed; what a program reads back on the host is: settings of a handle, and results that
// are written to host memory, as zeros (most are lines of entry_points.txt). Every create call gives a *new* handle: PyTorch keys its workspaces by (handle,
// stream), and the backward thread has a handle of its own, so that with one shared handle the second workspace would
// be missing.

#include <cublas_v2.h>

#include <cstring>
#include <memory>

#include "extension/virtual_device/blas/handle.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/stubs/handle.h"

using oomdiag::find_handle;

namespace oomdiag {

cublasStatus_t submit(cublasHandle_t handle) {
  return submit_kernel<BlasHandle>(handle, CUBLAS_STATUS_NOT_INITIALIZED, CUBLAS_STATUS_EXECUTION_FAILED);
}

cublasStatus_t give_zeros(cublasHandle_t handle, void* result, size_t bytes) {
  if (const cublasStatus_t error = submit(handle)) return error;
  if (find_handle(handle)->pointer_mode == CUBLAS_POINTER_MODE_HOST) std::memset(result, 0, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace oomdiag

/// What the stubs of functions that only compute do.
extern "C" int oomdiag_compute(void* handle) { return oomdiag::submit(static_cast<cublasHandle_t>(handle)); }

OOMDIAG_ENTRY_POINT cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  constexpr auto kFailed = CUBLAS_STATUS_NOT_INITIALIZED;
  if (const auto error = oomdiag::use_library(kFailed, kFailed)) return error;
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

OOMDIAG_ENTRY_POINT size_t cublasGetCudartVersion() { return CUDART_VERSION; }
