// Memory: device, managed, host, pools, and what a pointer points at.

#include <cstring>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;
using oomdiag::report;

namespace {

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }
CUdeviceptr* place(void** pointer) { return reinterpret_cast<CUdeviceptr*>(pointer); }

template <typename Value>
Value ask(CUpointer_attribute attribute, const void* pointer) {
  Value value{};
  cuPointerGetAttribute(&value, attribute, address(pointer));
  return value;
}

cudaMemoryType type_of(const void* pointer) {
  unsigned type = 0;
  if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(pointer)))
    return cudaMemoryTypeUnregistered;
  if (ask<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer)) return cudaMemoryTypeManaged;
  return type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
}

}  // namespace

OOMDIAG_ENTRY_POINT cudaError_t cudaMalloc(void** block, size_t bytes) {
  *block = nullptr;
  return in_context([&] { return bytes ? cuMemAlloc(place(block), bytes) : oomdiag_device_check_capture(); });
}

/// Freeing null makes the context: an old idiom, which PyTorch uses too.
OOMDIAG_ENTRY_POINT cudaError_t cudaFree(void* block) {
  return in_context([&] { return block ? cuMemFree(address(block)) : CUDA_SUCCESS; });
}

OOMDIAG_ENTRY_POINT cudaError_t cudaMallocPitch(void** block, size_t* pitch, size_t width, size_t height) {
  *pitch = oomdiag::pitch_of(width);
  return cudaMalloc(block, *pitch * height);
}

OOMDIAG_ENTRY_POINT cudaError_t cudaHostAlloc(void** block, size_t bytes, unsigned flags) {
  *block = nullptr;
  return in_context([&] { return bytes ? cuMemHostAlloc(block, bytes, flags) : CUDA_SUCCESS; });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaFreeHost(void* block) {
  return report(block ? cuMemFreeHost(block) : CUDA_SUCCESS);
}
/// Success for an address that CUDA does not know, since 11.0; only its type says so.
OOMDIAG_ENTRY_POINT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type = type_of(pointer);
  attributes->device = cudaInvalidDeviceId;
  if (attributes->type == cudaMemoryTypeUnregistered) return cudaSuccess;
  attributes->device = ask<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
  attributes->devicePointer = const_cast<void*>(pointer);
  if (attributes->type != cudaMemoryTypeDevice) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

OOMDIAG_ENTRY_POINT cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* requested_properties) {
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = static_cast<CUmemLocationType>(requested_properties->location.type);
  properties.location.id = requested_properties->location.id;
  return in_context([&] { return cuMemPoolCreate(pool, &properties); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaIpcOpenMemHandle(void** block, cudaIpcMemHandle_t handle, unsigned flags) {
  CUipcMemHandle same;
  static_assert(sizeof same == sizeof handle);
  std::memcpy(&same, &handle, sizeof same);
  return in_context([&] { return cuIpcOpenMemHandle(place(block), same, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  CUipcEventHandle same;
  static_assert(sizeof same == sizeof handle);
  std::memcpy(&same, &handle, sizeof same);
  return in_context([&] { return cuIpcOpenEventHandle(event, same); });
}
