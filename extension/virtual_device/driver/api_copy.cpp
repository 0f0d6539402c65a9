// Copies and sets. All are done at once (stream.h), with the contents that contents.cpp keeps.

#include <cuda.h>

#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult copy_now(void* to, const void* from, size_t bytes) {
  if (const CUresult error = oomdiag::check_unsafe_call()) return error;
  oomdiag_device_copy(to, from, bytes);
  return CUDA_SUCCESS;
}

/// Captured copies must not touch pageable memory.
CUresult check_captured_copy(CUstream handle, const void* to, const void* from) {
  oomdiag::Stream* stream = oomdiag::find_stream(handle);
  if (!stream || !stream->capture || (oomdiag::find_range(to) && oomdiag::find_range(from))) return CUDA_SUCCESS;
  return oomdiag::invalidate_capture(*stream);
}

CUresult copy_on(CUstream stream, void* to, const void* from, size_t bytes) {
  if (const CUresult error = check_captured_copy(stream, to, from)) return error;
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY)) return error;
  oomdiag_device_copy(to, from, bytes);
  return CUDA_SUCCESS;
}

CUresult set_on(CUstream stream, CUdeviceptr to, int value, size_t bytes) {
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMSET)) return error;
  oomdiag_device_fill(pointer(to), value, bytes);
  return CUDA_SUCCESS;
}

/// A word of four equal bytes is a byte fill, which all that matters is (zero); another pattern is forgotten, and
/// noted.
CUresult set_words_on(CUstream stream, CUdeviceptr to, unsigned value, size_t words) {
  const unsigned byte = value & 0xffu;
  if (value != byte * 0x01010101u) oomdiag_device_note("unsupported", "cuMemsetD32 of a pattern");
  return set_on(stream, to, static_cast<int>(byte), words * 4);
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_now(pointer(to), pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return copy_now(pointer(to), from, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return copy_now(to, pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_now(pointer(to), pointer(from), bytes);
}

OOMDIAG_ENTRY_POINT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_on(stream, pointer(to), pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy_on(stream, pointer(to), from, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_on(stream, to, pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_on(stream, pointer(to), pointer(from), bytes);
}

OOMDIAG_ENTRY_POINT CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) {
  return set_on(nullptr, to, value, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  return set_on(stream, to, value, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t words) {
  return set_words_on(nullptr, to, value, words);
}
OOMDIAG_ENTRY_POINT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t words, CUstream stream) {
  return set_words_on(stream, to, value, words);
}
