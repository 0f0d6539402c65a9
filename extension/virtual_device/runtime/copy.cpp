// Copies and sets.

#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;

namespace {

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

/// The driver's rectangle of this one.
CUDA_MEMCPY2D rectangle(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height) {
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = address(from);
  copy.srcPitch = from_pitch;
  copy.dstDevice = address(to);
  copy.dstPitch = to_pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  return copy;
}

cudaError_t copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      cudaStream_t stream) {
  const CUDA_MEMCPY2D copy = rectangle(to, to_pitch, from, from_pitch, width, height);
  return in_context([&] { return cuMemcpy2DAsync(&copy, stream); });
}

}  // namespace

OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return in_context([&] { return cuMemcpy(address(to), address(from), bytes); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                                cudaStream_t stream) {
  return in_context([&] { return cuMemcpyAsync(address(to), address(from), bytes, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) {
  return in_context([&] { return cuMemcpy(address(to), address(from), bytes); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                                    cudaStream_t stream) {
  return in_context([&] { return cuMemcpyAsync(address(to), address(from), bytes, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                             size_t width, size_t height, cudaMemcpyKind) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, nullptr);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                                  size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, stream);
}

OOMDIAG_ENTRY_POINT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return in_context([&] { return cuMemsetD8(address(to), static_cast<unsigned char>(value), bytes); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return in_context([&] { return cuMemsetD8Async(address(to), static_cast<unsigned char>(value), bytes, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  return in_context(
      [&] { return cuMemsetD2D8Async(address(to), pitch, static_cast<unsigned char>(value), width, height, nullptr); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                                                  cudaStream_t stream) {
  return in_context(
      [&] { return cuMemsetD2D8Async(address(to), pitch, static_cast<unsigned char>(value), width, height, stream); });
}
