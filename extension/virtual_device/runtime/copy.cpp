// Copies of rectangles and batches of copies.

#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/forward.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;

namespace {

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

CUresult copy_batch(void* const* to, const void* const* from, const size_t* bytes, size_t count, cudaStream_t stream) {
  CUresult error = CUDA_SUCCESS;
  for (size_t i = 0; i < count && !error; ++i) {
    error = cuMemcpyAsync(address(to[i]), address(from[i]), bytes[i], stream);
  }
  return error;
}

}  // namespace

CUresult oomdiag::copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                            cudaStream_t stream) {
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = address(from);
  copy.srcPitch = from_pitch;
  copy.dstDevice = address(to);
  copy.dstPitch = to_pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  return cuMemcpy2DAsync(&copy, stream);
}

#if CUDART_VERSION >= 13000
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes,
                                                     size_t count, cudaMemcpyAttributes*, size_t*, size_t,
                                                     cudaStream_t stream) {
  return in_context([&] { return copy_batch(to, from, bytes, count, stream); });
}
#else
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyBatchAsync(void** to, void** from, size_t* bytes, size_t count,
                                                     cudaMemcpyAttributes*, size_t*, size_t, size_t* failed,
                                                     cudaStream_t stream) {
  if (failed) *failed = SIZE_MAX;  // none of them: "not specific to any one copy" (cuda_runtime_api.h)
  return in_context([&] { return copy_batch(to, from, bytes, count, stream); });
}
#endif
