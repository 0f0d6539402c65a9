// 2D and 3D copies and sets, and copies to and from arrays.

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/array.h"
#include "extension/virtual_device/runtime/forward.h"

using oomdiag::driver_array;

namespace {

/// One side of a copy: an array, whose elements positions are counted in, or memory, in bytes (cuda_runtime_api.h).
struct Side {
  cudaArray_const_t array = nullptr;
  cudaPos at{};
  cudaPitchedPtr memory{};
  size_t element_bytes = 1;
};

Side side(cudaArray_const_t array, cudaPos at, cudaPitchedPtr memory) {
  Side made{.array = array, .at = at, .memory = memory};
  CUDA_ARRAY3D_DESCRIPTOR shape;
  if (array && cuArray3DGetDescriptor(&shape, driver_array(array)) == CUDA_SUCCESS)
    made.element_bytes = oomdiag::element_bytes(shape);
  return made;
}

CUresult copy(const Side& to, const Side& from, cudaExtent extent, cudaStream_t stream) {
  const size_t element_bytes = to.array ? to.element_bytes : from.element_bytes;
  CUDA_MEMCPY3D box{};
  box.srcXInBytes = from.at.x * from.element_bytes;
  box.srcY = from.at.y;
  box.srcZ = from.at.z;
  box.srcMemoryType = from.array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_UNIFIED;
  box.srcDevice = reinterpret_cast<CUdeviceptr>(from.memory.ptr);
  box.srcArray = driver_array(from.array);
  box.srcPitch = from.memory.pitch;
  box.srcHeight = from.memory.ysize;
  box.dstXInBytes = to.at.x * to.element_bytes;
  box.dstY = to.at.y;
  box.dstZ = to.at.z;
  box.dstMemoryType = to.array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_UNIFIED;
  box.dstDevice = reinterpret_cast<CUdeviceptr>(to.memory.ptr);
  box.dstArray = driver_array(to.array);
  box.dstPitch = to.memory.pitch;
  box.dstHeight = to.memory.ysize;
  box.WidthInBytes = extent.width * element_bytes;
  box.Height = extent.height;
  box.Depth = extent.depth;
  return cuMemcpy3DAsync(&box, stream);
}

}  // namespace

namespace oomdiag {

CUresult copy_3d(const cudaMemcpy3DParms* parameters, cudaStream_t stream) {
  return copy(side(parameters->dstArray, parameters->dstPos, parameters->dstPtr),
              side(parameters->srcArray, parameters->srcPos, parameters->srcPtr), parameters->extent, stream);
}

CUresult copy_of_array(bool is_to_array, cudaArray_const_t array, size_t x, size_t y, const void* memory, size_t pitch,
                       size_t width, size_t height, cudaStream_t stream) {
  const Side in_array{.array = array, .at = {x, y, 0}};
  const Side beside{.memory = {const_cast<void*>(memory), pitch, width, height}};
  return copy(is_to_array ? in_array : beside, is_to_array ? beside : in_array, {width, height, 1}, stream);
}

CUresult set_3d(cudaPitchedPtr memory, int value, cudaExtent extent, cudaStream_t stream) {
  CUresult error = CUDA_SUCCESS;
  for (size_t z = 0; z < extent.depth && !error; ++z) {
    const auto plane = reinterpret_cast<CUdeviceptr>(memory.ptr) + z * memory.pitch * memory.ysize;
    error =
        cuMemsetD2D8Async(plane, memory.pitch, static_cast<unsigned char>(value), extent.width, extent.height, stream);
  }
  return error;
}

}  // namespace oomdiag

OOMDIAG_ENTRY_POINT cudaError_t cudaMalloc3D(cudaPitchedPtr* block, cudaExtent extent) {
  *block = {.ptr = nullptr, .pitch = 0, .xsize = extent.width, .ysize = extent.height};
  return cudaMallocPitch(&block->ptr, &block->pitch, extent.width, extent.height * extent.depth);
}
