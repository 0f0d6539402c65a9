// Device, managed and host memory, and what a pointer points at. The rules are in memory.h.

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/pool.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::current_device;
using oomdiag::Device;
using oomdiag::MemoryKind;

namespace {

void* host_pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

/// What a call needs that takes or gives memory: a context, and no capture that forbids it.
CUresult check_memory_call() {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  if (const CUresult error = oomdiag::check_context()) return error;
  return oomdiag::check_unsafe_call();
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Device* device = current_device();
  if (!device) return oomdiag::check_context();
  const int64_t total = device->gpu.total_bytes;
  if (free_bytes) *free_bytes = static_cast<size_t>(oomdiag::count_free_bytes(*device));
  if (total_bytes) *total_bytes = static_cast<size_t>(total);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuMemAlloc(CUdeviceptr* block, size_t bytes) {
  OOMDIAG_OBSERVED(cuMemAlloc_v2, block, bytes);
  if (const CUresult error = check_memory_call()) return error;
  if (!block || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  return oomdiag::allocate_block(*current_device(), static_cast<int64_t>(bytes), reinterpret_cast<void**>(block));
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocPitch(CUdeviceptr* block, size_t* pitch, size_t width, size_t height, unsigned) {
  *pitch = oomdiag::pitch_of(width);
  return cuMemAlloc(block, *pitch * height);
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocManaged(CUdeviceptr* block, size_t bytes, unsigned flags) {
  OOMDIAG_OBSERVED(cuMemAllocManaged, block, bytes, flags);
  if (const CUresult error = check_memory_call()) return error;
  return oomdiag::allocate_managed(current_device()->ordinal, static_cast<int64_t>(bytes),
                                   reinterpret_cast<void**>(block));
}

OOMDIAG_ENTRY_POINT CUresult cuMemFree(CUdeviceptr block) {
  OOMDIAG_OBSERVED(cuMemFree_v2, block);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  if (const CUresult error = oomdiag::check_unsafe_call()) return error;
  const auto range = oomdiag::find_range(host_pointer(block));
  if (range && range->context)
    oomdiag::wait_until(range->context->end_ns);  // a GPU that is still at work is waited for
  const CUresult result = oomdiag::free_block(host_pointer(block));
  if (range && range->pool) oomdiag::trim_pools();  // that wait counts for a pool, too
  return result;
}

OOMDIAG_ENTRY_POINT CUresult cuMemHostAlloc(void** block, size_t bytes, unsigned flags) {
  OOMDIAG_OBSERVED(cuMemHostAlloc, block, bytes, flags);
  if (const CUresult error = check_memory_call()) return error;
  return oomdiag::allocate_host(static_cast<int64_t>(bytes), block);
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocHost(void** block, size_t bytes) {
  OOMDIAG_OBSERVED(cuMemAllocHost_v2, block, bytes);
  return cuMemHostAlloc(block, bytes, 0);
}

OOMDIAG_ENTRY_POINT CUresult cuMemFreeHost(void* block) {
  OOMDIAG_OBSERVED(cuMemFreeHost, block);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  return oomdiag::free_host(block);
}

OOMDIAG_ENTRY_POINT CUresult cuMemHostRegister(void* begin, size_t bytes, unsigned flags) {
  OOMDIAG_OBSERVED(cuMemHostRegister_v2, begin, bytes, flags);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  return oomdiag::register_host(begin, static_cast<int64_t>(bytes));
}

OOMDIAG_ENTRY_POINT CUresult cuMemHostUnregister(void* begin) {
  OOMDIAG_OBSERVED(cuMemHostUnregister, begin);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  return oomdiag::unregister_host(begin);
}

OOMDIAG_ENTRY_POINT CUresult cuMemHostGetFlags(unsigned* flags, void* host) {
  *flags = 0;
  return oomdiag::find_range(host) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

OOMDIAG_ENTRY_POINT CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
  const auto range = oomdiag::find_range(host_pointer(address));
  if (!range || range->kind == MemoryKind::host) return CUDA_ERROR_NOT_FOUND;
  if (begin) *begin = range->begin;
  if (bytes) *bytes = static_cast<size_t>(range->bytes);
  return CUDA_SUCCESS;
}

namespace {

/// Bytes of an attribute's answer, by its type in cuda.h (cuPointerGetAttribute).
size_t bytes_of_answer(CUpointer_attribute attribute) {
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return sizeof(uint64_t);
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      return sizeof(CUDA_POINTER_ATTRIBUTE_P2P_TOKENS);
    default:
      return sizeof(int);
  }
}

/// The answer as a number; nullopt where the range has none.
std::optional<uint64_t> answer(CUpointer_attribute attribute, const oomdiag::MemoryRange& range, CUdeviceptr address) {
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return reinterpret_cast<uintptr_t>(oomdiag::context_handle(range.context));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return range.kind == MemoryKind::host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return range.kind == MemoryKind::device ? std::nullopt : std::optional<uint64_t>(address);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return address;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return static_cast<uint64_t>(range.device);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return range.kind == MemoryKind::managed;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return 1;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return range.begin;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return static_cast<uint64_t>(range.bytes);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return reinterpret_cast<uintptr_t>(range.pool);
    default:
      return 0;
  }
}

void write_answer(void* value, CUpointer_attribute attribute, uint64_t number) {
  std::memset(value, 0, bytes_of_answer(attribute));
  std::memcpy(value, &number, std::min(sizeof number, bytes_of_answer(attribute)));  // low bytes first
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  const auto range = oomdiag::find_range(host_pointer(address));
  const auto number = range ? answer(attribute, *range, address) : std::nullopt;
  if (!number) return CUDA_ERROR_INVALID_VALUE;
  write_answer(value, attribute, *number);
  return CUDA_SUCCESS;
}

/// cuda.h: unlike the single query, an address that CUDA does not know is no error, its answers are null.
OOMDIAG_ENTRY_POINT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values,
                                                    CUdeviceptr address) {
  const auto range = oomdiag::find_range(host_pointer(address));
  for (unsigned i = 0; i < count; ++i) {
    write_answer(values[i], attributes[i], range ? answer(attributes[i], *range, address).value_or(0) : 0);
  }
  return CUDA_SUCCESS;
}
