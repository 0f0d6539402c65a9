#include "profiler/trace/live_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <span>

#include "profiler/event.h"
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

constexpr uint64_t kFirstIndexSize = 512;

// At most half full, so that linear probing stays short.
uint64_t largest_index(uint32_t capacity) { return std::max(std::bit_ceil(uint64_t{capacity} * 2), kFirstIndexSize); }

}  // namespace

LiveTable::LiveTable(Event* slots, uint32_t capacity, uint32_t reserved) noexcept
    : slots_(slots),
      mask_(kFirstIndexSize - 1),
      capacity_(capacity),
      reserved_(reserved),
      index_pages_(largest_index(capacity) * 2 * sizeof(Entry)),
      free_pages_(capacity * sizeof(uint32_t)) {
  index_ = static_cast<Entry*>(index_pages_.data());
  free_slots_ = static_cast<uint32_t*>(free_pages_.data());
  if (index_pages_.data() == nullptr || free_pages_.data() == nullptr) capacity_ = reserved_ = 0;
}

uint64_t LiveTable::find(uint64_t address) const noexcept {
  uint64_t place = home(address);
  while (index_[place].address != 0 && index_[place].address != address) place = (place + 1) & mask_;
  return place;
}

// The next one lies right behind and is twice as large. One that is no larger than it need be stays in the cache.
void LiveTable::grow_index() noexcept {
  const std::span<const Entry> before(index_, mask_ + 1);
  index_ += before.size();
  mask_ = before.size() * 2 - 1;
  for (const Entry& entry : before) {
    if (entry.address != 0) index_[find(entry.address)] = entry;
  }
}

[[gnu::hot]] bool LiveTable::insert(const Event& alloc) noexcept {
  if (capacity_ == 0) return false;
  if (used_ > mask_ / 2 && used_ < capacity_) grow_index();
  const uint64_t place = find(alloc.address);
  if (index_[place].address == 0) {  // else: a free that we did not see; the slot is taken over
    if (free_count_ == 0 && fresh_ >= reserved_) return false;
    index_[place] = {
        .address = alloc.address, .slot = free_count_ != 0 ? free_slots_[--free_count_] : fresh_++, .context = 0};
    ++used_;
  }
  index_[place].context = alloc.context;
  store_event(slots_[index_[place].slot], alloc);
  return true;
}

[[gnu::hot]] uint32_t LiveTable::erase(uint64_t address, uint64_t free_sequence) noexcept {
  if (capacity_ == 0) return 0;
  const uint64_t place = find(address);
  const auto [known, slot, context] = index_[place];
  if (known == 0) return 0;
  std::atomic_ref(slots_[slot].detail).store(free_sequence, std::memory_order_relaxed);
  std::atomic_ref(slots_[slot].flags).store(kSlotFreed, std::memory_order_release);
  free_slots_[free_count_++] = slot;
  --used_;
  close_gap(place);
  return context;
}

void LiveTable::clear() noexcept {
  for (uint64_t place = 0; used_ > 0 && place <= mask_;) {
    if (index_[place].address == 0) {
      ++place;  // else: what was pushed past this place may have moved into it
    } else {
      erase(index_[place].address, 0);
    }
  }
}

void LiveTable::place(uint64_t address, uint64_t sequence, uint32_t context) noexcept {
  if (capacity_ == 0) return;
  Entry& entry = index_[find(address)];
  if (entry.address == 0 || slots_[entry.slot].sequence != sequence) return;
  std::atomic_ref(slots_[entry.slot].context).store(context, std::memory_order_relaxed);
  entry.context = context;
}

// Moves later entries of the same run forward, so that probing never stops at a gap: no tombstones, constant time for
// ever.
[[gnu::hot]] void LiveTable::close_gap(uint64_t gap) noexcept {
  for (uint64_t next = (gap + 1) & mask_; index_[next].address != 0; next = (next + 1) & mask_) {
    const uint64_t distance_home = (next - home(index_[next].address)) & mask_;
    if (distance_home < ((next - gap) & mask_)) continue;
    index_[gap] = index_[next];
    gap = next;
  }
  index_[gap].address = 0;
}

}  // namespace oomdiag
