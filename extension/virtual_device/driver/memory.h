#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

#include "extension/virtual_device/driver/devices.h"

// Memory of the virtual GPUs.
//
// A GPU has no bytes, only an account of them (memory_account.h). What a program gets for cudaMalloc is a range of
// address space without access (address_space.h): it costs the host nothing, 140 GiB of it as little as 2 MiB, and a
// host that touches it dies of SIGSEGV as on a real GPU. A request that exceeds the GPU's memory fails with
// CUDA_ERROR_OUT_OF_MEMORY: that failure is the reason for this folder.
//
//   blocks         cuMemAlloc: pages, or a part of one that small blocks share     charged to the device (heap.h)
//   pool blocks    cuMemAllocAsync: the same, of a pool's pages                    the pool is charged (pool.h)
//   managed        cuMemAllocManaged: reachable from both sides                    not charged
//   host           cuMemHostAlloc, cuMemHostRegister: page-locked                  not charged
//   reservations   cuMemAddressReserve: range only                                 not charged     ┐ mapping.h: PyTorch's
//   handles        cuMemCreate: pages only, counted references                     charged         │ expandable segments
//   mappings       cuMemMap: a handle seen through a part of a reservation         hold the handle ┘
//
// What is in that memory is another matter: contents.h.

namespace oomdiag {

class Pool;
struct Context;

enum class MemoryKind { device, host, managed };

/// A range that some allocating call made; `device` is the owner's ordinal.
struct MemoryRange {
  uintptr_t begin = 0;
  int64_t bytes = 0;  ///< as they were asked for
  int device = 0;
  MemoryKind kind = MemoryKind::device;
  bool is_registered = false;  ///< host memory of the program, which must not be unmapped
  bool is_imported = false;    ///< of a GPU, and charged to the process that shares it
  bool is_mapping = false;     ///< of mapping.h: others may follow it without a gap
  Pool* pool = nullptr;        ///< whose block it is
  Context* context = nullptr;  ///< with which it goes; null for what is of a device and of no context
};

/// `bytes` of the device's memory. Makes its context.
CUresult allocate_block(Device& device, int64_t bytes, void** block);
CUresult allocate_from(Pool& pool, int64_t bytes, void** block);
CUresult allocate_managed(int device, int64_t bytes, void** block);
/// CUDA_ERROR_OUT_OF_MEMORY beyond what this machine has (host_memory.h), all pinned blocks together.
CUresult allocate_host(int64_t bytes, void** block);

/// Address space for a block of another process on the device.
CUresult import_block(Device& device, int64_t bytes, void** block);

/// Frees what allocate_block, allocate_from, allocate_managed and import_block gave, or allocate_host.
/// CUDA_ERROR_INVALID_VALUE for anything else.
CUresult free_block(void* block);
CUresult free_host(void* block);

/// Frees all that goes with the context, and all blocks of the device's pools.
void free_memory_of(const Context& context);
void free_pools_of(const Device& device);

CUresult register_host(void* begin, int64_t bytes);
CUresult unregister_host(void* begin);

/// The range that holds `address`, a mapping of mapping.h included.
std::optional<MemoryRange> find_range(const void* address);

/// Whether a copy or a set may read, or write, `bytes` from there on: no further than the block that holds the address, or the
/// mappings without a gap; where CUDA does not know it, as far as the host can (host_memory.h).
bool can_copy_from(const void* begin, size_t bytes);
bool can_copy_to(void* begin, size_t bytes);

}  // namespace oomdiag
