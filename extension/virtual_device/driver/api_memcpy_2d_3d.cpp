// 2D and 3D copies and sets, in linear memory and in arrays (array.h). Each is one piece of work.

#include <cuda.h>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/driver/copies.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/entry_point.h"

namespace {

/// One side of a copy: rows of `pitch` bytes, `rows` of them to a plane.
struct Side {
  char* begin;
  size_t pitch, rows;

  char* row(size_t y, size_t z) const { return begin + (z * rows + y) * pitch; }
};

struct Extent {
  size_t width = 0, height = 1, depth = 1;  ///< the first in bytes

  /// From the first byte of a side to its last one.
  size_t span(const Side& side) const {
    if (width * height * depth == 0) return 0;
    return static_cast<size_t>(side.row(height - 1, depth - 1) - side.begin) + width;
  }
};

Side place(CUmemorytype type, const void* host, CUdeviceptr device, CUarray handle, size_t pitch, size_t rows) {
  if (type == CU_MEMORYTYPE_ARRAY) {
    const oomdiag::Array& array = *oomdiag::find_array(handle);
    return {reinterpret_cast<char*>(array.block), array.row_bytes(), array.rows()};
  }
  const void* begin = type == CU_MEMORYTYPE_HOST ? host : reinterpret_cast<const void*>(device);
  return {static_cast<char*>(const_cast<void*>(begin)), pitch, rows};
}

CUresult copy(Side to, Side from, Extent extent, CUstream stream) {
  const bool is_allowed =
      oomdiag::can_copy_to(to.begin, extent.span(to)) && oomdiag::can_copy_from(from.begin, extent.span(from));
  if (!is_allowed) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY)) return error;
  for (size_t z = 0; z < extent.depth; ++z) {
    for (size_t y = 0; y < extent.height; ++y) oomdiag_device_copy(to.row(y, z), from.row(y, z), extent.width);
  }
  return CUDA_SUCCESS;
}

CUresult copy_2d(const CUDA_MEMCPY2D& c, CUstream stream) {
  Side from = place(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcArray, c.srcPitch, 0);
  Side to = place(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstArray, c.dstPitch, 0);
  from.begin = from.row(c.srcY, 0) + c.srcXInBytes;
  to.begin = to.row(c.dstY, 0) + c.dstXInBytes;
  return copy(to, from, {.width = c.WidthInBytes, .height = c.Height}, stream);
}

/// CUDA_MEMCPY3D, and its like between two contexts.
template <typename Copy>
CUresult copy_3d(const Copy& c, CUstream stream) {
  Side from = place(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcArray, c.srcPitch, c.srcHeight);
  Side to = place(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstArray, c.dstPitch, c.dstHeight);
  from.begin = from.row(c.srcY, c.srcZ) + c.srcXInBytes;
  to.begin = to.row(c.dstY, c.dstZ) + c.dstXInBytes;
  return copy(to, from, {.width = c.WidthInBytes, .height = c.Height, .depth = c.Depth}, stream);
}

/// Sets `width` numbers in each row.
CUresult set(CUdeviceptr to, size_t pitch, unsigned value, size_t number_bytes, size_t width, size_t height,
             CUstream stream) {
  const Side side{reinterpret_cast<char*>(to), pitch, height};
  const Extent extent{.width = width * number_bytes, .height = height};
  if (!oomdiag::can_copy_to(side.begin, extent.span(side))) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMSET)) return error;
  for (size_t y = 0; y < height; ++y) oomdiag::set_numbers(side.row(y, 0), value, number_bytes, width);
  return CUDA_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuMemcpy2D(const CUDA_MEMCPY2D* copy) { return copy_2d(*copy, nullptr); }
OOMDIAG_ENTRY_POINT CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* copy) { return copy_2d(*copy, nullptr); }
OOMDIAG_ENTRY_POINT CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  return copy_2d(*copy, stream);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpy3D(const CUDA_MEMCPY3D* copy) { return copy_3d(*copy, nullptr); }
OOMDIAG_ENTRY_POINT CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D* copy, CUstream stream) {
  return copy_3d(*copy, stream);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* copy) { return copy_3d(*copy, nullptr); }
OOMDIAG_ENTRY_POINT CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* copy, CUstream stream) {
  return copy_3d(*copy, stream);
}

OOMDIAG_ENTRY_POINT CUresult cuMemcpyHtoA(CUarray to, size_t offset, const void* from, size_t bytes) {
  return cuMemcpyHtoD(oomdiag::find_array(to)->block + offset, from, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyAtoH(void* to, CUarray from, size_t offset, size_t bytes) {
  return cuMemcpyDtoH(to, oomdiag::find_array(from)->block + offset, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoA(CUarray to, size_t offset, CUdeviceptr from, size_t bytes) {
  return cuMemcpyDtoD(oomdiag::find_array(to)->block + offset, from, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyAtoD(CUdeviceptr to, CUarray from, size_t offset, size_t bytes) {
  return cuMemcpyDtoD(to, oomdiag::find_array(from)->block + offset, bytes);
}

OOMDIAG_ENTRY_POINT CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
  return set(to, 0, value, 2, count, 1, nullptr);
}
OOMDIAG_ENTRY_POINT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return set(to, 0, value, 2, count, 1, stream);
}
#define OOMDIAG_SET_2D(name, type, bytes)                                                                    \
  OOMDIAG_ENTRY_POINT CUresult name(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height) { \
    return set(to, pitch, value, bytes, width, height, nullptr);                                             \
  }
#define OOMDIAG_SET_2D_ASYNC(name, type, bytes)                                                            \
  OOMDIAG_ENTRY_POINT CUresult name(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, \
                                    CUstream stream) {                                                     \
    return set(to, pitch, value, bytes, width, height, stream);                                            \
  }
OOMDIAG_SET_2D(cuMemsetD2D8, unsigned char, 1)
OOMDIAG_SET_2D(cuMemsetD2D16, unsigned short, 2)
OOMDIAG_SET_2D(cuMemsetD2D32, unsigned, 4)
OOMDIAG_SET_2D_ASYNC(cuMemsetD2D8Async, unsigned char, 1)
OOMDIAG_SET_2D_ASYNC(cuMemsetD2D16Async, unsigned short, 2)
OOMDIAG_SET_2D_ASYNC(cuMemsetD2D32Async, unsigned, 4)
