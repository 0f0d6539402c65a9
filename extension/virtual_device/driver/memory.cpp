#include "extension/virtual_device/driver/memory.h"

#include <sys/mman.h>

#include <map>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/mapping.h"

namespace oomdiag {
namespace {

/// Every live range but mappings, by its first address. Never destroyed, under memory_lock().
auto& ranges = *new std::map<uintptr_t, MemoryRange>;

auto find_entry(uintptr_t address) {
  auto entry = ranges.upper_bound(address);
  if (entry == ranges.begin()) return ranges.end();
  --entry;
  return address - entry->first < static_cast<uintptr_t>(entry->second.bytes) ? entry : ranges.end();
}

MemoryRange& add_range(void* begin, int64_t bytes, int device, MemoryKind kind) {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  return ranges[address] = {.begin = address, .bytes = bytes, .device = device, .kind = kind};
}

void unmap(uintptr_t begin, uintptr_t end) {
  if (end > begin) munmap(reinterpret_cast<void*>(begin), end - begin);
}

/// An accessible range that no card is charged for.
CUresult allocate_uncharged(int device, int64_t bytes, MemoryKind kind, void** block) {
  *block = nullptr;
  if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  const int64_t whole = round_to_pages(bytes);
  void* space = reserve_space(whole, true);
  if (!space) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard guard(memory_lock());
  add_range(space, whole, device, kind);
  *block = space;
  return CUDA_SUCCESS;
}

/// Takes the range that begins at `begin` off the table when `fits` likes it.
template <typename Predicate>
std::optional<MemoryRange> take_range(const void* begin, Predicate fits) {
  std::lock_guard guard(memory_lock());
  const auto entry = ranges.find(reinterpret_cast<uintptr_t>(begin));
  if (entry == ranges.end() || !fits(entry->second)) return std::nullopt;
  const MemoryRange range = entry->second;
  ranges.erase(entry);
  const bool is_charged = range.kind == MemoryKind::device && !range.is_imported;
  if (Device* owner = find_device(range.device); owner && is_charged) refund(*owner, range.bytes);
  return range;
}

}  // namespace

void* reserve_space(int64_t bytes, bool is_accessible) {
  const auto page = static_cast<uintptr_t>(kPageBytes);
  const auto length = static_cast<size_t>(bytes);
  const int protection = is_accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
  void* space = mmap(nullptr, length + page, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    // The program will see "out of memory", and the card is not to blame.
    oomdiag_device_note("unsupported", "device memory beyond the address space of the process (ulimit -v)");
    return nullptr;
  }
  const auto begin = reinterpret_cast<uintptr_t>(space);
  const uintptr_t aligned = (begin + page - 1) / page * page;
  unmap(begin, aligned);
  unmap(aligned + length, begin + length + page);
  return reinterpret_cast<void*>(aligned);
}

CUresult allocate_block(Device& device, int64_t bytes, void** block) {
  *block = nullptr;
  make_context(device);
  if (bytes == 0) return CUDA_SUCCESS;
  if (bytes < 0 || bytes > device.card.total_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const int64_t whole = round_to_pages(bytes);
  std::lock_guard guard(memory_lock());
  if (!charge(device, whole)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* space = reserve_space(whole, false);
  if (!space) {
    refund(device, whole);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  add_range(space, whole, device.ordinal, MemoryKind::device);
  *block = space;
  return CUDA_SUCCESS;
}

CUresult import_block(Device& device, int64_t bytes, void** block) {
  *block = reserve_space(bytes, false);
  if (!*block) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard guard(memory_lock());
  add_range(*block, bytes, device.ordinal, MemoryKind::device).is_imported = true;
  return CUDA_SUCCESS;
}

CUresult allocate_managed(int device, int64_t bytes, void** block) {
  return allocate_uncharged(device, bytes, MemoryKind::managed, block);
}

CUresult allocate_host(int64_t bytes, void** block) {
  const Device* device = current_device();
  return allocate_uncharged(device ? device->ordinal : 0, bytes, MemoryKind::host, block);
}

CUresult free_block(void* block) {
  if (!block) return CUDA_SUCCESS;
  const auto range = take_range(block, [](const MemoryRange& found) { return found.kind != MemoryKind::host; });
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  oomdiag_device_forget(block, static_cast<size_t>(range->bytes));
  unmap(range->begin, range->begin + static_cast<uintptr_t>(range->bytes));
  return CUDA_SUCCESS;
}

CUresult free_host(void* block) {
  const auto range = take_range(
      block, [](const MemoryRange& found) { return found.kind == MemoryKind::host && !found.is_registered; });
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  unmap(range->begin, range->begin + static_cast<uintptr_t>(range->bytes));
  return CUDA_SUCCESS;
}

CUresult register_host(void* begin, int64_t bytes) {
  if (!begin || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  const Device* device = current_device();
  std::lock_guard guard(memory_lock());
  if (find_entry(reinterpret_cast<uintptr_t>(begin)) != ranges.end()) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  add_range(begin, bytes, device ? device->ordinal : 0, MemoryKind::host).is_registered = true;
  return CUDA_SUCCESS;
}

CUresult unregister_host(void* begin) {
  const auto range = take_range(begin, [](const MemoryRange& found) { return found.is_registered; });
  return range ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

std::optional<MemoryRange> find_range(const void* address) {
  std::lock_guard guard(memory_lock());
  const auto entry = find_entry(reinterpret_cast<uintptr_t>(address));
  if (entry != ranges.end()) return entry->second;
  return find_mapping(reinterpret_cast<uintptr_t>(address));
}

}  // namespace oomdiag
