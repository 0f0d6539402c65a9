#include "profiler/trace/live_table.h"

#include <sys/mman.h>

#include <atomic>
#include <bit>

#include "profiler/trace/store.h"

namespace oomdiag {

PrivatePages::PrivatePages(size_t bytes) noexcept : bytes_(bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages != MAP_FAILED) data_ = pages;
}

PrivatePages::~PrivatePages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

namespace {

// At most half full, so that linear probing stays short.
uint64_t index_size(uint32_t capacity) { return std::bit_ceil(uint64_t{capacity} * 2); }

}  // namespace

LiveTable::LiveTable(Event* slots, uint32_t capacity, uint32_t reserved) noexcept
    : slots_(slots),
      capacity_(capacity),
      reserved_(reserved),
      mask_(index_size(capacity) - 1),
      index_pages_(index_size(capacity) * sizeof(Entry)),
      free_pages_(capacity * sizeof(uint32_t)) {
  if (index_pages_.data() == nullptr || free_pages_.data() == nullptr) capacity_ = reserved_ = 0;
}

// Blocks are multiples of 512 bytes: the low bits say nothing.
uint64_t LiveTable::home(uint64_t address) const noexcept {
  return ((address >> 9) * 0x9E3779B97F4A7C15u >> 20) & mask_;
}

uint64_t LiveTable::find(uint64_t address) const noexcept {
  const auto* index = static_cast<const Entry*>(index_pages_.data());
  uint64_t place = home(address);
  while (index[place].address != 0 && index[place].address != address) place = (place + 1) & mask_;
  return place;
}

bool LiveTable::insert(const Event& alloc) noexcept {
  if (capacity_ == 0) return false;
  auto* index = static_cast<Entry*>(index_pages_.data());
  auto* free_slots = static_cast<uint32_t*>(free_pages_.data());
  const uint64_t place = find(alloc.address);
  if (index[place].address == 0) {  // else: a free that we did not see; the slot is taken over
    if (free_count_ == 0 && fresh_ >= reserved_) return false;
    index[place] = {alloc.address, free_count_ != 0 ? free_slots[--free_count_] : fresh_++};
    ++used_;
  }
  store_event(slots_[index[place].slot], alloc);
  return true;
}

uint32_t LiveTable::erase(uint64_t address, uint64_t free_sequence) noexcept {
  if (capacity_ == 0) return 0;
  auto* index = static_cast<Entry*>(index_pages_.data());
  const uint64_t place = find(address);
  if (index[place].address == 0) return 0;
  const auto slot = static_cast<uint32_t>(index[place].slot);
  std::atomic_ref(slots_[slot].detail).store(free_sequence, std::memory_order_relaxed);
  std::atomic_ref(slots_[slot].flags).store(kSlotFreed, std::memory_order_release);
  static_cast<uint32_t*>(free_pages_.data())[free_count_++] = slot;
  --used_;
  close_gap(place);
  return slots_[slot].context;
}

void LiveTable::clear() noexcept {
  const auto* index = static_cast<const Entry*>(index_pages_.data());
  for (uint64_t place = 0; used_ > 0 && place <= mask_;) {
    if (index[place].address == 0) {
      ++place;  // else: what was pushed past this place may have moved into it
    } else {
      erase(index[place].address, 0);
    }
  }
}

void LiveTable::place(uint64_t address, uint64_t sequence, uint32_t context) noexcept {
  if (capacity_ == 0) return;
  const Entry& entry = static_cast<const Entry*>(index_pages_.data())[find(address)];
  if (entry.address == 0 || slots_[entry.slot].sequence != sequence) return;
  std::atomic_ref(slots_[entry.slot].context).store(context, std::memory_order_relaxed);
}

// Moves later entries of the same run forward, so that probing never meets a hole: no tombstones, constant time for ever.
void LiveTable::close_gap(uint64_t gap) noexcept {
  auto* index = static_cast<Entry*>(index_pages_.data());
  for (uint64_t next = (gap + 1) & mask_; index[next].address != 0; next = (next + 1) & mask_) {
    const uint64_t distance_home = (next - home(index[next].address)) & mask_;
    if (distance_home < ((next - gap) & mask_)) continue;
    index[gap] = index[next];
    gap = next;
  }
  index[gap].address = 0;
}

}  // namespace oomdiag
