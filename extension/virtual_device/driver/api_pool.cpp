// Stream-ordered memory pools (pool.h). A freed block serves the next request at once, whatever the clocks say.

#include <cuda.h>

#include <array>
#include <atomic>
#include <mutex>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/pool.h"
#include "extension/virtual_device/driver/stream.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Device;
using oomdiag::Pool;

namespace {

Pool* find_pool(CUmemoryPool handle) { return reinterpret_cast<Pool*>(handle); }

CUresult give_default_pool(CUmemoryPool* handle, CUdevice ordinal) {
  static auto& pools = *new std::array<Pool*, oomdiag::kMaxVirtualDevices>{};
  static auto& made = *new std::array<std::once_flag, oomdiag::kMaxVirtualDevices>;
  Device* device = oomdiag::find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  const auto place = static_cast<size_t>(ordinal);
  std::call_once(made[place], [&] { pools[place] = &Pool::make(*device); });
  *handle = reinterpret_cast<CUmemoryPool>(pools[place]);
  return CUDA_SUCCESS;
}

/// Those that cuDeviceSetMemPool set, by ordinal.
std::array<std::atomic<CUmemoryPool>, oomdiag::kMaxVirtualDevices> chosen_pools{};

CUresult give_pool(CUmemoryPool* handle, CUdevice ordinal) {
  const CUresult error = give_default_pool(handle, ordinal);
  if (error) return error;
  if (const CUmemoryPool chosen = chosen_pools[static_cast<size_t>(ordinal)]) *handle = chosen;
  return CUDA_SUCCESS;
}

/// Pools are of a device's memory: `use` gets its ordinal.
template <typename Use>
CUresult at(const CUmemLocation& location, Use use) {
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) return use(location.id);
  oomdiag_device_note("unsupported", "memory pools of the host");
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  return give_default_pool(pool, device);
}
OOMDIAG_ENTRY_POINT CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) { return give_pool(pool, device); }
OOMDIAG_ENTRY_POINT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
  if (!oomdiag::find_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (&find_pool(pool)->device() != oomdiag::find_device(device)) return CUDA_ERROR_INVALID_VALUE;
  chosen_pools[static_cast<size_t>(device)] = pool;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuMemGetDefaultMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType) {
  return at(*location, [pool](CUdevice device) { return give_default_pool(pool, device); });
}
OOMDIAG_ENTRY_POINT CUresult cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType) {
  return at(*location, [pool](CUdevice device) { return give_pool(pool, device); });
}
OOMDIAG_ENTRY_POINT CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType, CUmemoryPool pool) {
  return at(*location, [pool](CUdevice device) { return cuDeviceSetMemPool(device, pool); });
}

OOMDIAG_ENTRY_POINT CUresult cuMemPoolCreate(CUmemoryPool* handle, const CUmemPoolProps* requested_properties) {
  Device* device = oomdiag::find_device(requested_properties->location.id);
  if (requested_properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return at(requested_properties->location, [](CUdevice) { return CUDA_SUCCESS; });
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  *handle = reinterpret_cast<CUmemoryPool>(&Pool::make(*device));
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t least) {
  std::lock_guard guard(oomdiag::memory_lock());
  find_pool(handle)->trim(least);
  return CUDA_SUCCESS;
}

/// The pool itself stays: blocks of it may still be alive, and cuda.h lets them be. Where it was chosen, the default is again.
OOMDIAG_ENTRY_POINT CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  for (auto& chosen : chosen_pools) {
    CUmemoryPool expected = handle;
    chosen.compare_exchange_strong(expected, nullptr);
  }
  std::lock_guard guard(oomdiag::memory_lock());
  find_pool(handle)->set_release_threshold(0);
  find_pool(handle)->trim(0);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  std::lock_guard guard(oomdiag::memory_lock());
  Pool& pool = *find_pool(handle);
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) pool.set_release_threshold(*static_cast<cuuint64_t*>(value));
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) pool.reset_reserved_high();
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) pool.reset_used_high();
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  std::lock_guard guard(oomdiag::memory_lock());
  const Pool& pool = *find_pool(handle);
  const auto give = [value](int64_t bytes) {
    *static_cast<cuuint64_t*>(value) = static_cast<cuuint64_t>(bytes);
    return CUDA_SUCCESS;
  };
  switch (static_cast<int>(attribute)) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *static_cast<cuuint64_t*>(value) = pool.release_threshold();
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      return give(pool.reserved_bytes());
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      return give(pool.used_bytes());
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      return give(pool.reserved_high_bytes());
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      return give(pool.used_high_bytes());
    default:
      *static_cast<int*>(value) = 1;  // the three reuse policies, on by default
      return CUDA_SUCCESS;
  }
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocFromPoolAsync(CUdeviceptr* block, size_t bytes, CUmemoryPool pool,
                                                     CUstream stream) {
  OOMDIAG_OBSERVED(cuMemAllocFromPoolAsync, block, bytes, pool, stream);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  const auto requested = static_cast<int64_t>(bytes);
  if (const CUresult error = oomdiag::allocate_from(*find_pool(pool), requested, reinterpret_cast<void**>(block)))
    return error;
  const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
  if (error) oomdiag::free_block(reinterpret_cast<void*>(*block));
  return error;
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocAsync(CUdeviceptr* block, size_t bytes, CUstream handle) {
  OOMDIAG_OBSERVED(cuMemAllocAsync, block, bytes, handle);
  const oomdiag::Stream* stream = oomdiag::find_stream(handle);
  if (!stream) return oomdiag::stream_error(handle);
  CUmemoryPool pool;
  if (const CUresult error = give_pool(&pool, stream->context->device->ordinal)) return error;
  return cuMemAllocFromPoolAsync(block, bytes, pool, handle);
}

OOMDIAG_ENTRY_POINT CUresult cuMemFreeAsync(CUdeviceptr block, CUstream stream) {
  OOMDIAG_OBSERVED(cuMemFreeAsync, block, stream);
  if (const CUresult error = oomdiag::free_block(reinterpret_cast<void*>(block))) return error;
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEM_FREE);
}
