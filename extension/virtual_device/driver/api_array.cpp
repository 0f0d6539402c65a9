// Arrays, and the objects through which kernels would read and write them: textures and surfaces. An array takes its bytes of
// the GPU; an object keeps what it was made of.

#include <cuda.h>

#include <memory>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Array;
using oomdiag::find_array;

namespace {

CUresult create(CUarray* handle, const CUDA_ARRAY3D_DESCRIPTOR& shape) {
  if (shape.Width == 0 || shape.NumChannels == 0) return CUDA_ERROR_INVALID_VALUE;
  auto array = std::make_unique<Array>(Array{.shape = shape});
  if (const CUresult error = cuMemAlloc(&array->block, array->row_bytes() * array->rows() * array->planes())) {
    return error;
  }
  oomdiag_device_note("estimate", "arrays for textures: a GPU may pad their rows and planes");
  *handle = reinterpret_cast<CUarray>(array.release());
  return CUDA_SUCCESS;
}

/// What a texture or a surface object points at.
struct View {
  CUDA_RESOURCE_DESC resource{};
  CUDA_TEXTURE_DESC texture{};
  CUDA_RESOURCE_VIEW_DESC part{};
};

View* find_view(unsigned long long object) { return reinterpret_cast<View*>(object); }

CUresult create_view(unsigned long long* object, const View& view) {
  if (const CUresult error = oomdiag::check_context()) return error;
  *object = reinterpret_cast<unsigned long long>(new View(view));
  return CUDA_SUCCESS;
}

template <typename Value>
CUresult give(Value* place, const Value& value) {
  *place = value;
  return CUDA_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuArray3DCreate(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR* shape) {
  return create(array, *shape);
}
OOMDIAG_ENTRY_POINT CUresult cuArrayCreate(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* shape) {
  return create(array, {.Width = shape->Width,
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
OOMDIAG_ENTRY_POINT CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR* shape, CUarray array) {
  return give(shape, find_array(array)->shape);
}
OOMDIAG_ENTRY_POINT CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR* shape, CUarray array) {
  const CUDA_ARRAY3D_DESCRIPTOR& whole = find_array(array)->shape;
  return give(
      shape,
      CUDA_ARRAY_DESCRIPTOR{
          .Width = whole.Width, .Height = whole.Height, .Format = whole.Format, .NumChannels = whole.NumChannels});
}

OOMDIAG_ENTRY_POINT CUresult cuTexObjectCreate(CUtexObject* object, const CUDA_RESOURCE_DESC* resource,
                                               const CUDA_TEXTURE_DESC* texture, const CUDA_RESOURCE_VIEW_DESC* part) {
  return create_view(object, {.resource = *resource,
                              .texture = texture ? *texture : CUDA_TEXTURE_DESC{},
                              .part = part ? *part : CUDA_RESOURCE_VIEW_DESC{}});
}
OOMDIAG_ENTRY_POINT CUresult cuTexObjectDestroy(CUtexObject object) {
  delete find_view(object);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC* resource, CUtexObject object) {
  return give(resource, find_view(object)->resource);
}
OOMDIAG_ENTRY_POINT CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC* texture, CUtexObject object) {
  return give(texture, find_view(object)->texture);
}
OOMDIAG_ENTRY_POINT CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC* part, CUtexObject object) {
  return give(part, find_view(object)->part);
}

OOMDIAG_ENTRY_POINT CUresult cuSurfObjectCreate(CUsurfObject* object, const CUDA_RESOURCE_DESC* resource) {
  return create_view(object, {.resource = *resource});
}
OOMDIAG_ENTRY_POINT CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC* resource, CUsurfObject object) {
  return give(resource, find_view(object)->resource);
}
