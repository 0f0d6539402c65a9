// Memory: device, managed, host, pools, and what a pointer points at.

#include <cstring>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/runtime/forms.h"
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

OOMDIAG_ENTRY_POINT cudaError_t cudaMallocManaged(void** block, size_t bytes, unsigned flags) {
  return in_context([&] { return cuMemAllocManaged(place(block), bytes, flags); });
}

/// Freeing null makes the context: an old idiom, which PyTorch uses too.
OOMDIAG_ENTRY_POINT cudaError_t cudaFree(void* block) {
  return in_context([&] { return block ? cuMemFree(address(block)) : CUDA_SUCCESS; });
}

OOMDIAG_ENTRY_POINT cudaError_t cudaMallocPitch(void** block, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(block, *pitch * height);
}

OOMDIAG_ENTRY_POINT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return in_context([&] { return cuMemGetInfo(free_bytes, total_bytes); });
}

OOMDIAG_ENTRY_POINT cudaError_t cudaHostAlloc(void** block, size_t bytes, unsigned flags) {
  *block = nullptr;
  return in_context([&] { return bytes ? cuMemHostAlloc(block, bytes, flags) : CUDA_SUCCESS; });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMallocHost(void** block, size_t bytes) { return cudaHostAlloc(block, bytes, 0); }
OOMDIAG_ENTRY_POINT cudaError_t cudaFreeHost(void* block) {
  return report(block ? cuMemFreeHost(block) : CUDA_SUCCESS);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaHostRegister(void* begin, size_t bytes, unsigned flags) {
  return in_context([&] { return cuMemHostRegister(begin, bytes, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaHostUnregister(void* begin) { return report(cuMemHostUnregister(begin)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  return report(cuMemHostGetDevicePointer(place(device), host, flags));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaHostGetFlags(unsigned* flags, void* host) {
  return report(cuMemHostGetFlags(flags, host));
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

OOMDIAG_ENTRY_POINT cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) {
  return cudaSuccess;
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) {
  return cudaSuccess;
}

OOMDIAG_ENTRY_POINT cudaError_t cudaMallocAsync(void** block, size_t bytes, cudaStream_t stream) {
  return in_context([&] { return cuMemAllocAsync(place(block), bytes, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMallocFromPoolAsync(void** block, size_t bytes, cudaMemPool_t pool,
                                                        cudaStream_t stream) {
  return in_context([&] { return cuMemAllocFromPoolAsync(place(block), bytes, pool, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaFreeAsync(void* block, cudaStream_t stream) {
  return in_context([&] { return cuMemFreeAsync(address(block), stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int ordinal) {
  return report(cuDeviceGetDefaultMemPool(pool, ordinal));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int ordinal) {
  return report(cuDeviceGetMemPool(pool, ordinal));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* wanted) {
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = static_cast<CUmemLocationType>(wanted->location.type);
  properties.location.id = wanted->location.id;
  return in_context([&] { return cuMemPoolCreate(pool, &properties); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return report(cuMemPoolDestroy(pool)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
  return report(cuMemPoolTrimTo(pool, bytes));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaDeviceSetMemPool(int ordinal, cudaMemPool_t pool) {
  return in_context([&] { return cuDeviceSetMemPool(ordinal, pool); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc*, size_t) {
  return report(cuMemPoolSetAccess(pool, nullptr, 0));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return report(cuMemPoolSetAttribute(pool, static_cast<CUmemPool_attribute>(attribute), value));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return report(cuMemPoolGetAttribute(pool, static_cast<CUmemPool_attribute>(attribute), value));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* block) {
  return report(cuIpcGetMemHandle(reinterpret_cast<CUipcMemHandle*>(handle), address(block)));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaIpcOpenMemHandle(void** block, cudaIpcMemHandle_t handle, unsigned flags) {
  CUipcMemHandle same;
  static_assert(sizeof same == sizeof handle);
  std::memcpy(&same, &handle, sizeof same);
  return in_context([&] { return cuIpcOpenMemHandle(place(block), same, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaIpcCloseMemHandle(void* block) {
  return report(cuIpcCloseMemHandle(address(block)));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  return report(cuIpcGetEventHandle(reinterpret_cast<CUipcEventHandle*>(handle), event));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  CUipcEventHandle same;
  static_assert(sizeof same == sizeof handle);
  std::memcpy(&same, &handle, sizeof same);
  return in_context([&] { return cuIpcOpenEventHandle(event, same); });
}
