#include "extension/virtual_device/driver/memory.h"

#include <atomic>
#include <map>
#include <vector>

#include "extension/virtual_device/driver/address_space.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/heap.h"
#include "extension/virtual_device/driver/host_memory.h"
#include "extension/virtual_device/driver/mapping.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/pool.h"
#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {
namespace {

/// Every live range but mappings, by its first address. Never destroyed, under memory_lock().
auto& ranges = *new std::map<uintptr_t, MemoryRange>;

/// The pages of a GPU's own heap.
class GpuPages final : public Pages {
 public:
  explicit GpuPages(Device& device) : device_(device) {}
  bool charge_pages(int64_t bytes) override { return charge(device_, bytes); }
  void refund_pages(int64_t bytes) override { refund(device_, bytes); }

 private:
  Device& device_;
};

struct GpuHeap {
  explicit GpuHeap(Device& device) : pages(device) {}
  GpuPages pages;
  Heap heap{pages};
};

Heap& heap_of(Device& device) {
  static auto& heaps = *new std::map<int, GpuHeap>;
  return heaps.try_emplace(device.index, device).first->second.heap;
}

auto find_entry(uintptr_t address) {
  auto entry = ranges.upper_bound(address);
  if (entry == ranges.begin()) return ranges.end();
  --entry;
  return address - entry->first < static_cast<uintptr_t>(entry->second.bytes) ? entry : ranges.end();
}

MemoryRange& add_range(uintptr_t begin, int64_t bytes, int device, MemoryKind kind) {
  MemoryRange& range = ranges[begin];
  range = {.begin = begin, .bytes = bytes, .device = device, .kind = kind, .context = current_context()};
  return range;
}

CUresult result_of(Oom oom) {
  if (oom == Oom::of_host) note_no_addresses();
  return oom == Oom::none ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/// A block of the GPU's own heap, or of a pool's.
CUresult allocate(Device& device, Pool* pool, int64_t bytes, void** block) {
  *block = nullptr;
  Context& context = context_on(device);
  if (const CUresult error = make_context(context)) return error;
  if (bytes == 0) return CUDA_SUCCESS;
  if (bytes < 0 || bytes > capacity_of(device)) return CUDA_ERROR_OUT_OF_MEMORY;
  uintptr_t begin = 0;
  Oom oom = Oom::of_gpu;
  const auto try_once = [&] {
    std::lock_guard guard(memory_lock());
    oom = pool ? pool->allocate(bytes, &begin) : heap_of(device).allocate(bytes, &begin);
    if (oom == Oom::none) {
      MemoryRange& range = add_range(begin, bytes, device.ordinal, MemoryKind::device);
      range.pool = pool;
      range.context = pool ? nullptr : &context;
    }
  };
  try_once();
  if (oom == Oom::of_gpu && trim_pools()) try_once();  // what is about to be given back serves first
  *block = reinterpret_cast<void*>(begin);
  return result_of(oom);
}

std::atomic<int64_t> pinned_bytes = 0;

/// Counts a pinned block of so many bytes; false where the machine has not so much.
bool charge_host(int64_t bytes) {
  if (bytes <= host_memory_bytes() - pinned_bytes.fetch_add(bytes)) return true;
  pinned_bytes -= bytes;
  oomdiag_device_note("unsupported", "pinned host memory beyond what this machine has for its processes");
  return false;
}

/// An accessible range that no GPU is charged for.
CUresult allocate_uncharged(int device, int64_t bytes, MemoryKind kind, void** block) {
  *block = nullptr;
  if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  const int64_t whole = round_to_pages(bytes);
  void* space = map_host_memory(whole);
  if (!space) return result_of(Oom::of_host);
  std::lock_guard guard(memory_lock());
  add_range(reinterpret_cast<uintptr_t>(space), whole, device, kind);
  *block = space;
  return CUDA_SUCCESS;
}

/// Takes the range that begins at `begin` off the table when `fits` likes it.
template <typename Predicate>
std::optional<MemoryRange> take_range(const void* begin, Predicate fits) {
  const auto entry = ranges.find(reinterpret_cast<uintptr_t>(begin));
  if (entry == ranges.end() || !fits(entry->second)) return std::nullopt;
  const MemoryRange range = entry->second;
  ranges.erase(entry);
  return range;
}

bool is_no_host_memory(const MemoryRange& range) { return range.kind != MemoryKind::host; }

/// Bytes from `address` to the end of the range. What a small block is rounded to is its own.
size_t bytes_to_end(const MemoryRange& range, uintptr_t address) {
  return range.begin + static_cast<uintptr_t>(SmallHeap::align(range.bytes)) - address;
}

/// Whether all `bytes` lie in what CUDA knows there; nullopt where it knows nothing, or where what was registered ends.
std::optional<bool> is_within_known(const void* begin, size_t bytes) {
  auto address = reinterpret_cast<uintptr_t>(begin);
  auto range = find_range(begin);
  if (!range) return std::nullopt;
  while (bytes > bytes_to_end(*range, address)) {
    if (range->is_registered) return std::nullopt;
    bytes -= bytes_to_end(*range, address);
    address += bytes_to_end(*range, address);
    const auto next = find_range(reinterpret_cast<void*>(address));
    if (!range->is_mapping || !next || !next->is_mapping) return false;
    range = next;
  }
  return true;
}

/// Of managed memory, or of a pinned block.
void free_pages_of_host(const MemoryRange& range) {
  unmap_host_memory(reinterpret_cast<void*>(range.begin), range.bytes);
  if (range.kind == MemoryKind::host) pinned_bytes -= range.bytes;
}

void give_up(const MemoryRange& range) {
  if (range.is_imported) return give_addresses(range.begin, round_to_pages(range.bytes));
  if (range.pool) return range.pool->free(range.begin, range.bytes);
  if (Device* owner = find_device(range.device)) heap_of(*owner).free(range.begin, range.bytes);
}

}  // namespace

CUresult allocate_block(Device& device, int64_t bytes, void** block) { return allocate(device, nullptr, bytes, block); }

CUresult allocate_from(Pool& pool, int64_t bytes, void** block) { return allocate(pool.device(), &pool, bytes, block); }

CUresult import_block(Device& device, int64_t bytes, void** block) {
  uintptr_t begin = 0;
  {
    std::lock_guard guard(memory_lock());
    begin = take_addresses(round_to_pages(bytes));
    if (begin) add_range(begin, bytes, device.ordinal, MemoryKind::device).is_imported = true;
  }
  *block = reinterpret_cast<void*>(begin);
  return result_of(begin ? Oom::none : Oom::of_host);
}

CUresult allocate_managed(int device, int64_t bytes, void** block) {
  return allocate_uncharged(device, bytes, MemoryKind::managed, block);
}

CUresult allocate_host(int64_t bytes, void** block) {
  const Device* device = current_device();
  const int64_t whole = bytes > 0 ? round_to_pages(bytes) : 0;
  *block = nullptr;
  if (whole > host_memory_bytes() || !charge_host(whole)) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult error = allocate_uncharged(device ? device->ordinal : 0, bytes, MemoryKind::host, block);
  if (error) pinned_bytes -= whole;
  return error;
}

CUresult free_block(void* block) {
  if (!block) return CUDA_SUCCESS;
  const auto found = find_range(block);
  if (!found || found->begin != reinterpret_cast<uintptr_t>(block)) return CUDA_ERROR_INVALID_VALUE;
  oomdiag_device_forget(block, static_cast<size_t>(found->bytes));  // before anybody else can have the address
  std::optional<MemoryRange> range;
  {
    std::lock_guard guard(memory_lock());
    range = take_range(block, is_no_host_memory);
    if (range && range->kind == MemoryKind::device) give_up(*range);
  }
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  if (range->kind == MemoryKind::managed) free_pages_of_host(*range);
  return CUDA_SUCCESS;
}

CUresult free_host(void* block) {
  std::optional<MemoryRange> range;
  {
    std::lock_guard guard(memory_lock());
    range =
        take_range(block, [](const MemoryRange& found) { return !is_no_host_memory(found) && !found.is_registered; });
  }
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  free_pages_of_host(*range);
  return CUDA_SUCCESS;
}

namespace {

template <typename Predicate>
void free_all(Predicate fits) {
  std::vector<MemoryRange> gone;
  {
    std::lock_guard guard(memory_lock());
    std::erase_if(ranges,
                  [&](const auto& entry) { return fits(entry.second) && (gone.push_back(entry.second), true); });
  }
  for (const MemoryRange& range : gone) {  // before anybody else can have the address
    oomdiag_device_forget(reinterpret_cast<void*>(range.begin), static_cast<size_t>(range.bytes));
  }
  std::lock_guard guard(memory_lock());
  for (const MemoryRange& range : gone) {
    if (range.kind == MemoryKind::device) {
      give_up(range);
    } else if (!range.is_registered) {
      free_pages_of_host(range);
    }
  }
}

}  // namespace

void free_memory_of(const Context& context) {
  free_all([&](const MemoryRange& range) { return range.context == &context; });
}

void free_pools_of(const Device& device) {
  free_all([&](const MemoryRange& range) { return range.pool && &range.pool->device() == &device; });
  trim_pools_of(device);
}

CUresult register_host(void* begin, int64_t bytes) {
  if (!begin || bytes <= 0 || !can_read(begin, static_cast<size_t>(bytes))) return CUDA_ERROR_INVALID_VALUE;
  const Device* device = current_device();
  std::lock_guard guard(memory_lock());
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const auto next = ranges.lower_bound(address);
  const bool overlaps = next != ranges.end() && next->first < address + static_cast<uintptr_t>(bytes);
  if (overlaps || find_entry(address) != ranges.end()) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  add_range(address, bytes, device ? device->ordinal : 0, MemoryKind::host).is_registered = true;
  return CUDA_SUCCESS;
}

CUresult unregister_host(void* begin) {
  std::lock_guard guard(memory_lock());
  const auto range = take_range(begin, [](const MemoryRange& found) { return found.is_registered; });
  return range ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

std::optional<MemoryRange> find_range(const void* address) {
  if (is_forked_child()) return std::nullopt;  // the lock may be held for ever, by a thread that is not here
  std::lock_guard guard(memory_lock());
  const auto entry = find_entry(reinterpret_cast<uintptr_t>(address));
  if (entry != ranges.end()) return entry->second;
  return find_mapping(reinterpret_cast<uintptr_t>(address));
}

bool can_copy_from(const void* begin, size_t bytes) {
  const auto is_known = is_within_known(begin, bytes);
  return bytes == 0 || (is_known ? *is_known : can_read(begin, bytes));
}

bool can_copy_to(void* begin, size_t bytes) {
  const auto is_known = is_within_known(begin, bytes);
  return bytes == 0 || (is_known ? *is_known : can_write(begin, bytes));
}

}  // namespace oomdiag
