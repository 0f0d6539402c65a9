// Stream-ordered memory pools. Work is done at once, so a freed block is free at once; a pool keeps nothing back, so
// that what it reserves is what is used, in whole pages.

#include <cuda.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/stream.h"

using oomdiag::Device;

namespace {

struct Pool {
  Device* device = nullptr;
  uint64_t used_bytes = 0;
  uint64_t high_bytes = 0;
  uint64_t release_threshold = 0;
};

struct PoolBlock {
  Pool* pool = nullptr;
  uint64_t bytes = 0;
};

// Under pool_lock, never destroyed.
auto& pool_lock = *new std::mutex;
auto& default_pools = *new std::array<Pool, 16>;
auto& blocks = *new std::unordered_map<CUdeviceptr, PoolBlock>;

Pool* find_pool(CUmemoryPool handle) { return reinterpret_cast<Pool*>(handle); }

CUresult give_default_pool(CUmemoryPool* handle, CUdevice ordinal) {
  Device* device = oomdiag::find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  Pool& pool = default_pools[static_cast<size_t>(ordinal)];
  pool.device = device;
  *handle = reinterpret_cast<CUmemoryPool>(&pool);
  return CUDA_SUCCESS;
}

CUresult allocate_from(Pool& pool, CUdeviceptr* block, size_t bytes, CUstream stream) {
  if (const CUresult error =
          oomdiag::allocate_block(*pool.device, static_cast<int64_t>(bytes), reinterpret_cast<void**>(block)))
    return error;
  std::lock_guard guard(pool_lock);
  const auto whole = static_cast<uint64_t>(oomdiag::round_to_pages(static_cast<int64_t>(bytes)));
  pool.used_bytes += whole;
  pool.high_bytes = std::max(pool.high_bytes, pool.used_bytes);
  if (*block) blocks[*block] = {.pool = &pool, .bytes = whole};
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  return give_default_pool(pool, device);
}
OOMDIAG_ENTRY_POINT CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
  return give_default_pool(pool, device);
}

OOMDIAG_ENTRY_POINT CUresult cuMemPoolCreate(CUmemoryPool* handle, const CUmemPoolProps* wanted) {
  Device* device = oomdiag::find_device(wanted->location.id);
  if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  *handle = reinterpret_cast<CUmemoryPool>(new Pool{.device = device});
  return CUDA_SUCCESS;
}

/// The pool itself stays: blocks of it may still be alive, and cuda.h lets them be.
OOMDIAG_ENTRY_POINT CUresult cuMemPoolDestroy(CUmemoryPool) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuMemPoolSetAccess(CUmemoryPool, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

OOMDIAG_ENTRY_POINT CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  std::lock_guard guard(pool_lock);
  Pool& pool = *find_pool(handle);
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) pool.release_threshold = *static_cast<uint64_t*>(value);
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH || attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    pool.high_bytes = pool.used_bytes;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  std::lock_guard guard(pool_lock);
  const Pool& pool = *find_pool(handle);
  switch (static_cast<int>(attribute)) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *static_cast<uint64_t*>(value) = pool.release_threshold;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *static_cast<uint64_t*>(value) = pool.used_bytes;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *static_cast<uint64_t*>(value) = pool.high_bytes;
      return CUDA_SUCCESS;
    default:
      *static_cast<int*>(value) = 1;  // the three reuse policies, on by default
      return CUDA_SUCCESS;
  }
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocFromPoolAsync(CUdeviceptr* block, size_t bytes, CUmemoryPool pool,
                                                     CUstream stream) {
  OOMDIAG_OBSERVED(cuMemAllocFromPoolAsync, block, bytes, pool, stream);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  return allocate_from(*find_pool(pool), block, bytes, stream);
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocAsync(CUdeviceptr* block, size_t bytes, CUstream handle) {
  OOMDIAG_OBSERVED(cuMemAllocAsync, block, bytes, handle);
  const oomdiag::Stream* stream = oomdiag::find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
  CUmemoryPool pool;
  if (const CUresult error = give_default_pool(&pool, stream->device->ordinal)) return error;
  return cuMemAllocFromPoolAsync(block, bytes, pool, handle);
}

OOMDIAG_ENTRY_POINT CUresult cuMemFreeAsync(CUdeviceptr block, CUstream stream) {
  OOMDIAG_OBSERVED(cuMemFreeAsync, block, stream);
  {
    std::lock_guard guard(pool_lock);
    const auto entry = blocks.find(block);
    if (entry != blocks.end()) entry->second.pool->used_bytes -= entry->second.bytes;
    if (entry != blocks.end()) blocks.erase(entry);
  }
  if (const CUresult error = oomdiag::free_block(reinterpret_cast<void*>(block))) return error;
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEM_FREE);
}
