#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

#include "extension/virtual_device/driver/devices.h"

// Memory of the virtual cards.
//
// A card has no bytes, only an account of them. What a program gets for cudaMalloc is a range of address space without
// access (PROT_NONE, not reserved): it costs the host nothing, 140 GiB of it as little as 2 MiB, and a host that
// touches it dies of SIGSEGV as on a real card. The account is kept in pages of 2 MiB, which is what cudaMalloc and
// cuMemCreate take on real cards, and a request that the account cannot bear is refused with CUDA_ERROR_OUT_OF_MEMORY:
// that refusal is the reason for this folder.
//
//   blocks         cuMemAlloc: range and pages in one                        charged to the device
//   managed        cuMemAllocManaged: reachable from both sides              not charged
//   host           cuMemHostAlloc, cuMemHostRegister: page-locked            not charged
//   reservations   cuMemAddressReserve: range only                           not charged     ┐ mapping.h: PyTorch's
//   handles        cuMemCreate: pages only, counted references               charged         │ expandable segments
//   mappings       cuMemMap: a handle seen through a part of a reservation   hold the handle ┘
//
// What is in that memory is another matter: contents.h.

namespace oomdiag {

inline constexpr int64_t kPageBytes = 2 << 20;

constexpr int64_t round_to_pages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

enum class MemoryKind { device, host, managed };

/// A range that some allocating call made; `device` is the owner's ordinal.
struct MemoryRange {
  uintptr_t begin = 0;
  int64_t bytes = 0;
  int device = 0;
  MemoryKind kind = MemoryKind::device;
  bool is_registered = false;  ///< host memory of the program, which must not be unmapped
  bool is_imported = false;    ///< of a card, and charged to the process that shares it
};

/// Address space for `bytes`, page-aligned; null when the process has no more.
void* reserve_space(int64_t bytes, bool is_accessible);

/// `bytes` of the device's memory. Makes its context.
CUresult allocate_block(Device& device, int64_t bytes, void** block);
CUresult allocate_managed(int device, int64_t bytes, void** block);
CUresult allocate_host(int64_t bytes, void** block);

/// Address space for a block of another process on the device.
CUresult import_block(Device& device, int64_t bytes, void** block);

/// Frees what allocate_block, allocate_managed and import_block gave, or allocate_host. CUDA_ERROR_INVALID_VALUE for anything else.
CUresult free_block(void* block);
CUresult free_host(void* block);

CUresult register_host(void* begin, int64_t bytes);
CUresult unregister_host(void* begin);

/// The range that holds `address`, a mapping of mapping.h included.
std::optional<MemoryRange> find_range(const void* address);

}  // namespace oomdiag
