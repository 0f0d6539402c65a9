// Copies and sets.

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;

namespace {

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

/// Row by row, as one piece of work.
CUresult copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                   cudaStream_t stream) {
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY)) return error;
  for (size_t row = 0; row < height; ++row) {
    oomdiag_device_copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                        width);
  }
  return CUDA_SUCCESS;
}

CUresult set_rows(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMSET)) return error;
  for (size_t row = 0; row < height; ++row) oomdiag_device_fill(static_cast<char*>(to) + row * pitch, value, width);
  return CUDA_SUCCESS;
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
  return in_context([&] { return copy_rows(to, to_pitch, from, from_pitch, width, height, nullptr); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                                  size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return in_context([&] { return copy_rows(to, to_pitch, from, from_pitch, width, height, stream); });
}

OOMDIAG_ENTRY_POINT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return in_context([&] { return cuMemsetD8(address(to), static_cast<unsigned char>(value), bytes); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return in_context([&] { return cuMemsetD8Async(address(to), static_cast<unsigned char>(value), bytes, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  return in_context([&] { return set_rows(to, pitch, value, width, height, nullptr); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                                                  cudaStream_t stream) {
  return in_context([&] { return set_rows(to, pitch, value, width, height, stream); });
}
