#pragma once

#include <cstddef>
#include <cstdint>

#include "profiler/event.h"
#include "profiler/trace/mix.h"

namespace oomdiag {

/// Zero-filled private memory that is taken page by page as it is touched; never from the heap, so that it may be used
/// where nothing may be allocated. Empty if the system does not grant it.
class PrivatePages {
 public:
  explicit PrivatePages(size_t bytes) noexcept;
  ~PrivatePages();
  PrivatePages(const PrivatePages&) = delete;
  PrivatePages& operator=(const PrivatePages&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

/// The live blocks of one device: a copy of each one's alloc event in a slot of the trace file, found by address through
/// an index in private memory. Calls must not overlap: the allocator's lock of the device serialises them. They neither
/// allocate nor lock, and take constant time, but that the index doubles from time to time.
class alignas(64) LiveTable {
 public:
  /// `slots` are `capacity` zeroed events in the mapped file, of which the first `reserved` may be written.
  LiveTable(Event* slots, uint32_t capacity, uint32_t reserved) noexcept;

  /// Adds the block of an alloc event. False if there is no free slot: the block is then unknown to the table.
  bool insert(const Event& alloc) noexcept;
  /// Takes the block at this address out and gives the context of its alloc event, 0 if it is not known. Its slot still
  /// has it, with kSlotFreed, until another block needs it: after an OOM everything is unwound, and what was alive
  /// then must not be forgotten. `free_sequence` 0: nobody saw the free.
  uint32_t erase(uint64_t address, uint64_t free_sequence) noexcept;
  /// Asks for the memory that `insert` (of a new block) or `erase` will need. Between two calls the program has the processor's
  /// caches to itself, and what is asked for early is there in time. Inlined, or the compiler takes it for a no-op.
  [[gnu::always_inline]] void expect(uint64_t address, bool is_new) const noexcept {
    if (capacity_ == 0) return;
    const Entry* entry = &index_[home(address)];
    if (!is_new) {
      __builtin_prefetch(&slots_[entry->slot], 1);
    } else {
      __builtin_prefetch(entry, 1);
      if (free_count_ != 0) __builtin_prefetch(&slots_[free_slots_[free_count_ - 1]], 1);
    }
  }
  /// Takes them all out: their frees were not seen.
  void clear() noexcept;
  /// Says late where the block at this address was allocated, if it still is the one of that alloc event.
  void place(uint64_t address, uint64_t sequence, uint32_t context) noexcept;

  uint32_t used() const { return used_; }
  uint32_t reserved() const { return reserved_; }
  /// Says that the file has space for this many slots now.
  void set_reserved(uint32_t slots) { reserved_ = slots; }
  uint32_t capacity() const { return capacity_; }

 private:
  struct Entry {
    uint64_t address;  ///< 0 = free
    uint32_t slot;
    uint32_t context;  ///< of the alloc event
  };
  uint64_t find(uint64_t address) const noexcept;  ///< its place in the index, or the free place where it would go
  void close_gap(uint64_t place) noexcept;
  // Blocks are multiples of 512 bytes: the low bits say nothing.
  uint64_t home(uint64_t address) const noexcept { return (spread(address >> 9) >> 20) & mask_; }
  void grow_index() noexcept;

  Event* slots_;
  Entry* index_;  ///< of mask_ + 1 entries, in index_pages_
  uint64_t mask_;
  uint32_t* free_slots_;  ///< in free_pages_
  uint32_t capacity_;
  uint32_t reserved_;
  uint32_t used_ = 0;
  uint32_t fresh_ = 0;       ///< slots below this one were used before
  uint32_t free_count_ = 0;  ///< how many of those are free again, listed in free_slots_
  PrivatePages index_pages_;
  PrivatePages free_pages_;
};

}  // namespace oomdiag
