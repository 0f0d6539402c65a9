#include "extension/virtual_device/runtime/status.h"

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/errors.h"
#include "extension/virtual_device/entry_point.h"

namespace oomdiag {

thread_local cudaError_t last_error = cudaSuccess;

CUresult initialize() { return cuInit(0); }

namespace {

thread_local int chosen_ordinal = 0;

}  // namespace

int current_ordinal() {
  CUdevice device = 0;
  return cuCtxGetDevice(&device) ? chosen_ordinal : device;
}

CUresult choose_device(int ordinal) {
  CUcontext context = nullptr;
  if (const CUresult error = cuDevicePrimaryCtxRetain(&context, ordinal)) return error;
  chosen_ordinal = ordinal;
  return cuCtxSetCurrent(context);
}

CUresult bind_context() {
  CUdevice device = 0;
  if (cuCtxGetDevice(&device) == CUDA_SUCCESS) [[likely]]
    return CUDA_SUCCESS;
  if (const CUresult error = initialize()) return error;
  return choose_device(chosen_ordinal);
}

}  // namespace oomdiag

/// What every generated stub of this library does.
extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return oomdiag::report(cudaErrorNotSupported);
}

OOMDIAG_ENTRY_POINT cudaError_t cudaGetLastError() {
  const cudaError_t error = oomdiag::last_error;
  oomdiag::last_error = cudaSuccess;
  return error;
}

OOMDIAG_ENTRY_POINT cudaError_t cudaPeekAtLastError() { return oomdiag::last_error; }

OOMDIAG_ENTRY_POINT const char* cudaGetErrorString(cudaError_t code) {
  const oomdiag::ErrorText* error = oomdiag::find_error(code);
  return error ? error->text : "unrecognized error code";
}

OOMDIAG_ENTRY_POINT const char* cudaGetErrorName(cudaError_t code) {
  const oomdiag::ErrorText* error = oomdiag::find_error(code);
  return error ? error->runtime_name : "unrecognized error code";
}
