// Arrays, textures and surfaces. Textures and surfaces keep what they were made of.

#include "extension/virtual_device/runtime/array.h"

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::driver_array;
using oomdiag::in_context;
using oomdiag::report;

namespace {

CUarray_format format_of(const cudaChannelFormatDesc& channels) {
  if (channels.f == cudaChannelFormatKindFloat) return channels.x == 16 ? CU_AD_FORMAT_HALF : CU_AD_FORMAT_FLOAT;
  const bool is_signed = channels.f == cudaChannelFormatKindSigned;
  if (channels.x == 8) return is_signed ? CU_AD_FORMAT_SIGNED_INT8 : CU_AD_FORMAT_UNSIGNED_INT8;
  if (channels.x == 16) return is_signed ? CU_AD_FORMAT_SIGNED_INT16 : CU_AD_FORMAT_UNSIGNED_INT16;
  return is_signed ? CU_AD_FORMAT_SIGNED_INT32 : CU_AD_FORMAT_UNSIGNED_INT32;
}

cudaChannelFormatKind kind_of(CUarray_format format) {
  switch (static_cast<int>(format)) {
    case CU_AD_FORMAT_HALF:
    case CU_AD_FORMAT_FLOAT:
      return cudaChannelFormatKindFloat;
    case CU_AD_FORMAT_SIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT32:
      return cudaChannelFormatKindSigned;
    default:
      return cudaChannelFormatKindUnsigned;
  }
}

CUresult create(cudaArray_t* array, const cudaChannelFormatDesc& channels, cudaExtent extent, unsigned flags) {
  const auto count = static_cast<unsigned>((channels.x > 0) + (channels.y > 0) + (channels.z > 0) + (channels.w > 0));
  const CUDA_ARRAY3D_DESCRIPTOR shape{.Width = extent.width,
                                      .Height = extent.height,
                                      .Depth = extent.depth,
                                      .Format = format_of(channels),
                                      .NumChannels = count,
                                      .Flags = flags};
  return cuArray3DCreate(reinterpret_cast<CUarray*>(array), &shape);
}

}  // namespace

OOMDIAG_ENTRY_POINT cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w,
                                                                cudaChannelFormatKind kind) {
  return {.x = x, .y = y, .z = z, .w = w, .f = kind};
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMallocArray(cudaArray_t* array, const cudaChannelFormatDesc* channels, size_t width,
                                                size_t height, unsigned flags) {
  return in_context([&] { return create(array, *channels, {width, height, 0}, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMalloc3DArray(cudaArray_t* array, const cudaChannelFormatDesc* channels,
                                                  cudaExtent extent, unsigned flags) {
  return in_context([&] { return create(array, *channels, extent, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaFreeArray(cudaArray_t array) {
  return array ? report(cuArrayDestroy(driver_array(array))) : cudaSuccess;
}
OOMDIAG_ENTRY_POINT cudaError_t cudaArrayGetInfo(cudaChannelFormatDesc* channels, cudaExtent* extent, unsigned* flags,
                                                 cudaArray_t array) {
  CUDA_ARRAY3D_DESCRIPTOR shape;
  if (const CUresult error = cuArray3DGetDescriptor(&shape, driver_array(array))) return report(error);
  const int bits = static_cast<int>(oomdiag::element_bytes(shape) / shape.NumChannels * 8);
  const auto channel = [&](unsigned number) { return number <= shape.NumChannels ? bits : 0; };
  if (channels) *channels = {bits, channel(2), channel(3), channel(4), kind_of(shape.Format)};
  if (extent) *extent = {shape.Width, shape.Height, shape.Depth};
  if (flags) *flags = shape.Flags;
  return cudaSuccess;
}
OOMDIAG_ENTRY_POINT cudaError_t cudaCreateTextureObject(cudaTextureObject_t* object, const cudaResourceDesc* resource,
                                                        const cudaTextureDesc* texture, const cudaResourceViewDesc*) {
  return in_context([&] {
    *object = reinterpret_cast<cudaTextureObject_t>(
        new oomdiag::TextureObject{*resource, texture ? *texture : cudaTextureDesc{}});
    return CUDA_SUCCESS;
  });
}
