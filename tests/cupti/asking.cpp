// A library that asks the driver for memory itself, as NCCL, cuBLAS or somebody's extension does. Built under several names:
// the report must distinguish them.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>

#define CALLED_BY_TESTS extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kPage = size_t{2} << 20;
auto& mapped = *new std::map<CUdeviceptr, size_t>;

CUdeviceptr map_pages(CUmemGenericAllocationHandle handle, size_t bytes) {
  CUdeviceptr space = 0;
  if (cuMemAddressReserve(&space, bytes, 0, 0, 0) != CUDA_SUCCESS) return 0;
  return cuMemMap(space, bytes, 0, handle, 0) == CUDA_SUCCESS ? space : 0;
}

}  // namespace

CALLED_BY_TESTS void* take_device(size_t bytes) {
  void* block = nullptr;
  if (cudaMalloc(&block, bytes) == cudaSuccess) return block;
  cudaGetLastError();  // or PyTorch would find it at its next call
  return nullptr;
}

CALLED_BY_TESTS void give_device(void* block) { cudaFree(block); }

/// cuMemCreate, cuMemMap, and the handle given back at once, as NCCL does: the mapping keeps the pages.
CALLED_BY_TESTS void* take_pages(size_t bytes) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  CUmemGenericAllocationHandle handle = 0;
  if (cuMemCreate(&handle, whole, &properties, 0) != CUDA_SUCCESS) return nullptr;
  const CUdeviceptr space = map_pages(handle, whole);
  cuMemRelease(handle);
  mapped[space] = whole;
  return reinterpret_cast<void*>(space);
}

CALLED_BY_TESTS void give_pages(void* block) {
  const auto space = reinterpret_cast<CUdeviceptr>(block);
  cuMemUnmap(space, mapped[space]);
}

CALLED_BY_TESTS void* take_pool(size_t bytes) {
  void* block = nullptr;
  return cudaMallocAsync(&block, bytes, nullptr) == cudaSuccess ? block : nullptr;
}

CALLED_BY_TESTS void give_pool(void* block) { cudaFreeAsync(block, nullptr); }

CALLED_BY_TESTS void* take_pinned(size_t bytes) {
  void* block = nullptr;
  return cudaHostAlloc(&block, bytes, 0) == cudaSuccess ? block : nullptr;
}

CALLED_BY_TESTS void* take_managed(size_t bytes) {
  void* block = nullptr;
  return cudaMallocManaged(&block, bytes, cudaMemAttachGlobal) == cudaSuccess ? block : nullptr;
}

/// What the GPU says is used: the other side of the account.
CALLED_BY_TESTS size_t used_bytes() {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  return total_bytes - free_bytes;
}

/// For torch.cuda.MemPool: its allocator's signatures.
CALLED_BY_TESTS void* pool_take(long bytes, int, void*) { return take_device(static_cast<size_t>(bytes)); }
CALLED_BY_TESTS void pool_give(void* block, long, int, void*) { give_device(block); }
