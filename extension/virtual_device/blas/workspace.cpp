// What a handle of cuBLAS takes of its GPU. "cuBLAS library uses an internal workspace pool that is allocated when the context
// is created" (cuBLAS documentation, cublasSetWorkspace); its size is that which CUBLAS_WORKSPACE_CONFIG names, by default
// :4096:2:16:8, and 32 MiB on Hopper.

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "extension/virtual_device/blas/handle.h"
#include "extension/virtual_device/driver/device.h"

namespace oomdiag {
namespace {

/// The sum of ":size in KiB:count" pairs.
size_t parse_configuration(const char* text) {
  size_t sum = 0;
  size_t kibibytes = 0;
  size_t count = 0;
  int length = 0;
  while (std::sscanf(text, ":%zu:%zu%n", &kibibytes, &count, &length) == 2) {
    sum += kibibytes * count << 10;
    text += length;
  }
  return sum;
}

size_t workspace_bytes(int ordinal) {
  const char* configured = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  if (configured && *configured) return parse_configuration(configured);
  int major = 0;
  cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ordinal);
  return major == 9 ? size_t{32} << 20 : parse_configuration(":4096:2:16:8");
}

/// A capture forbids allocations; that of a handle is let pass, as the library has its ways.
CUresult allocate_uncaptured(CUdeviceptr* block, size_t bytes) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  cuThreadExchangeStreamCaptureMode(&mode);
  const CUresult result = cuMemAlloc(block, bytes);
  cuThreadExchangeStreamCaptureMode(&mode);
  return result;
}

}  // namespace

CUresult allocate_workspace(BlasHandle& handle) {
  static std::array<std::atomic<bool>, 64> has_handle{};
  CUdevice ordinal = 0;
  if (const CUresult error = cuCtxGetDevice(&ordinal)) return error;
  if (!has_handle[static_cast<size_t>(ordinal) % has_handle.size()].exchange(true)) return CUDA_SUCCESS;
  const size_t bytes = workspace_bytes(ordinal);
  if (bytes == 0) return CUDA_SUCCESS;
  const CUresult result = allocate_uncaptured(&handle.workspace, bytes);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) oomdiag_device_note_oom(static_cast<int64_t>(bytes));
  return result;
}

}  // namespace oomdiag
