// Arrays, and the objects through which kernels would read and write them: textures and surfaces. An array takes its bytes of
// the GPU; an object keeps what it was made of.

#include <cuda.h>

#include <memory>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/forward.h"
#include "extension/virtual_device/entry_point.h"

namespace oomdiag {

CUresult create_array(CUarray* handle, const CUDA_ARRAY3D_DESCRIPTOR& shape) {
  if (shape.Width == 0 || shape.NumChannels == 0) return CUDA_ERROR_INVALID_VALUE;
  auto array = std::make_unique<Array>(Array{.shape = shape});
  if (const CUresult error = cuMemAlloc(&array->block, array->row_bytes() * array->rows() * array->planes())) {
    return error;
  }
  oomdiag_device_note("estimate", "arrays for textures: a GPU may pad their rows and planes");
  *handle = reinterpret_cast<CUarray>(array.release());
  return CUDA_SUCCESS;
}

CUresult create_view(unsigned long long* object, const View& view) {
  if (const CUresult error = check_context()) return error;
  *object = reinterpret_cast<unsigned long long>(new View(view));
  return CUDA_SUCCESS;
}

}  // namespace oomdiag

using oomdiag::Array;
using oomdiag::find_array;

OOMDIAG_ENTRY_POINT CUresult cuArrayCreate(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* shape) {
  return oomdiag::create_array(array, {.Width = shape->Width,
                                       .Height = shape->Height,
                                       .Depth = 0,
                                       .Format = shape->Format,
                                       .NumChannels = shape->NumChannels,
                                       .Flags = 0});
}
OOMDIAG_ENTRY_POINT CUresult cuArrayDestroy(CUarray handle) {
  const std::unique_ptr<Array> array(find_array(handle));
  return array ? cuMemFree(array->block) : CUDA_ERROR_INVALID_HANDLE;
}
OOMDIAG_ENTRY_POINT CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR* shape, CUarray array) {
  const CUDA_ARRAY3D_DESCRIPTOR& whole = find_array(array)->shape;
  *shape = {.Width = whole.Width, .Height = whole.Height, .Format = whole.Format, .NumChannels = whole.NumChannels};
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuTexObjectCreate(CUtexObject* object, const CUDA_RESOURCE_DESC* resource,
                                               const CUDA_TEXTURE_DESC* texture, const CUDA_RESOURCE_VIEW_DESC* part) {
  return oomdiag::create_view(object, {.resource = *resource,
                                       .texture = texture ? *texture : CUDA_TEXTURE_DESC{},
                                       .part = part ? *part : CUDA_RESOURCE_VIEW_DESC{}});
}
