// 2D and 3D copies and sets, in linear memory and in arrays (array.h): rows of entry_points.txt. Each is one piece of work.

#include <cuda.h>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/driver/copies.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/forward.h"
#include "extension/virtual_device/driver/memory.h"

namespace oomdiag {
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
    const Array& array = *find_array(handle);
    return {reinterpret_cast<char*>(array.block), array.row_bytes(), array.rows()};
  }
  const void* begin = type == CU_MEMORYTYPE_HOST ? host : reinterpret_cast<const void*>(device);
  return {static_cast<char*>(const_cast<void*>(begin)), pitch, rows};
}

CUresult copy(Side to, Side from, Extent extent, CUstream stream) {
  const bool is_allowed = can_copy_to(to.begin, extent.span(to)) && can_copy_from(from.begin, extent.span(from));
  if (!is_allowed) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY)) return error;
  for (size_t z = 0; z < extent.depth; ++z) {
    for (size_t y = 0; y < extent.height; ++y) oomdiag_device_copy(to.row(y, z), from.row(y, z), extent.width);
  }
  return CUDA_SUCCESS;
}

/// CUDA_MEMCPY3D, and its like between two contexts.
template <typename Copy>
CUresult copy_any_3d(const Copy& c, CUstream stream) {
  Side from = place(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcArray, c.srcPitch, c.srcHeight);
  Side to = place(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstArray, c.dstPitch, c.dstHeight);
  from.begin = from.row(c.srcY, c.srcZ) + c.srcXInBytes;
  to.begin = to.row(c.dstY, c.dstZ) + c.dstXInBytes;
  return copy(to, from, {.width = c.WidthInBytes, .height = c.Height, .depth = c.Depth}, stream);
}

}  // namespace

CUresult copy_2d(const CUDA_MEMCPY2D* copied, CUstream stream) {
  const CUDA_MEMCPY2D& c = *copied;
  Side from = place(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcArray, c.srcPitch, 0);
  Side to = place(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstArray, c.dstPitch, 0);
  from.begin = from.row(c.srcY, 0) + c.srcXInBytes;
  to.begin = to.row(c.dstY, 0) + c.dstXInBytes;
  return copy(to, from, {.width = c.WidthInBytes, .height = c.Height}, stream);
}

CUresult copy_3d(const CUDA_MEMCPY3D* copied, CUstream stream) { return copy_any_3d(*copied, stream); }
CUresult copy_3d(const CUDA_MEMCPY3D_PEER* copied, CUstream stream) { return copy_any_3d(*copied, stream); }

CUresult set_rows(CUstream stream, Address to, size_t pitch, unsigned value, size_t number_bytes, size_t width,
                  size_t height) {
  const Side side{static_cast<char*>(to.pointer), pitch, height};
  const Extent extent{.width = width * number_bytes, .height = height};
  if (!can_copy_to(side.begin, extent.span(side))) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMSET)) return error;
  for (size_t y = 0; y < height; ++y) set_numbers(side.row(y, 0), value, number_bytes, width);
  return CUDA_SUCCESS;
}

}  // namespace oomdiag
