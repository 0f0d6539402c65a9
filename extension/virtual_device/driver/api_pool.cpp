// Stream-ordered memory pools. A freed block is free at once, whatever the clocks say. A pool keeps freed pages up to its
// release threshold and serves the next request from them (cuda.h, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD), as if they could
// always be put together: pools map pages where they are wanted.

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
  uint64_t used_bytes = 0;  ///< in whole pages, as all of these
  uint64_t kept_bytes = 0;  ///< free, and not given back to the card
  uint64_t used_high_bytes = 0;
  uint64_t reserved_high_bytes = 0;
  uint64_t release_threshold = 0;

  uint64_t reserved_bytes() const { return used_bytes + kept_bytes; }
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

/// Moves `bytes` between the card and what the pool keeps: kept pages are charged like used ones.
bool keep(Pool& pool, uint64_t bytes) {
  std::lock_guard guard(oomdiag::memory_lock());
  if (!oomdiag::charge(*pool.device, static_cast<int64_t>(bytes))) return false;
  pool.kept_bytes += bytes;
  return true;
}

void give_back(Pool& pool, uint64_t bytes) {
  std::lock_guard guard(oomdiag::memory_lock());
  oomdiag::refund(*pool.device, static_cast<int64_t>(bytes));
  pool.kept_bytes -= bytes;
}

CUresult allocate_from(Pool& pool, CUdeviceptr* block, size_t bytes, CUstream stream) {
  std::lock_guard guard(pool_lock);
  const auto whole = static_cast<uint64_t>(oomdiag::round_to_pages(static_cast<int64_t>(bytes)));
  const uint64_t reused = std::min(pool.kept_bytes, whole);
  give_back(pool, reused);
  const CUresult error =
      oomdiag::allocate_block(*pool.device, static_cast<int64_t>(bytes), reinterpret_cast<void**>(block));
  if (error) keep(pool, reused);
  if (error) return error;
  pool.used_bytes += whole;
  pool.used_high_bytes = std::max(pool.used_high_bytes, pool.used_bytes);
  pool.reserved_high_bytes = std::max(pool.reserved_high_bytes, pool.reserved_bytes());
  if (*block) blocks[*block] = {.pool = &pool, .bytes = whole};
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
}

/// The block's pages are the pool's again, as many as it may keep.
void take_back(const PoolBlock& block) {
  Pool& pool = *block.pool;
  pool.used_bytes -= block.bytes;
  const uint64_t room = pool.release_threshold - std::min(pool.release_threshold, pool.reserved_bytes());
  keep(pool, std::min(block.bytes, room));
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

OOMDIAG_ENTRY_POINT CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t least) {
  std::lock_guard guard(pool_lock);
  Pool& pool = *find_pool(handle);
  const uint64_t above = pool.reserved_bytes() - std::min<uint64_t>(pool.reserved_bytes(), least);
  give_back(pool, std::min(pool.kept_bytes, above));
  return CUDA_SUCCESS;
}

/// The pool itself stays: blocks of it may still be alive, and cuda.h lets them be.
OOMDIAG_ENTRY_POINT CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  find_pool(handle)->release_threshold = 0;
  return cuMemPoolTrimTo(handle, 0);
}
OOMDIAG_ENTRY_POINT CUresult cuMemPoolSetAccess(CUmemoryPool, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

OOMDIAG_ENTRY_POINT CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  std::lock_guard guard(pool_lock);
  Pool& pool = *find_pool(handle);
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) pool.release_threshold = *static_cast<uint64_t*>(value);
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) pool.reserved_high_bytes = pool.reserved_bytes();
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) pool.used_high_bytes = pool.used_bytes;
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
      *static_cast<uint64_t*>(value) = pool.reserved_bytes();
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *static_cast<uint64_t*>(value) = pool.used_bytes;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      *static_cast<uint64_t*>(value) = pool.reserved_high_bytes;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *static_cast<uint64_t*>(value) = pool.used_high_bytes;
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
  std::lock_guard guard(pool_lock);
  if (const CUresult error = oomdiag::free_block(reinterpret_cast<void*>(block))) return error;
  const auto entry = blocks.find(block);
  if (entry != blocks.end()) take_back(entry->second);
  if (entry != blocks.end()) blocks.erase(entry);
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEM_FREE);
}
