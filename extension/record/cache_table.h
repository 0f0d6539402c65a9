#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oomdiag {

/// A hash table that forgets everything when it is full. Its entries lie in the order in which they came, which in a training
/// is much the one in which they are asked for in each step, close to each other: between two questions the program runs, and
/// little of this is in the processor's caches. Starts small, since many threads need few. One thread.
template <class Entry>
class CacheTable {
 public:
  /// The entry of this hash for which `is_it(entry)`, null if there is none. There until the next `add`.
  template <class IsIt>
  Entry* find(uint64_t hash, IsIt is_it) {
    for (size_t slot = hash >> 40;; ++slot) {
      const Slot found = slots_[slot % slots_.size()];
      if (found.end == 0) return nullptr;
      if (found.tag != tag_of(hash)) continue;
      if (Entry* const entry = &entries_[found.end - 1u]; is_it(*entry)) return entry;
    }
  }
  /// Adds an entry that is not there.
  Entry& add(uint64_t hash, const Entry& entry) {
    if (entries_.size() * 2 >= slots_.size()) make_room();
    size_t slot = (hash >> 40) % slots_.size();
    while (slots_[slot].end != 0) slot = (slot + 1) % slots_.size();
    entries_.push_back(entry);
    slots_[slot] = {static_cast<uint16_t>(entries_.size()), tag_of(hash)};
    return entries_.back();
  }

 private:
  static constexpr size_t kFirst = 64, kMax = 1 << 14;  // slots, twice as many as entries
  struct Slot {
    uint16_t end = 0;  ///< the entry is the one before this; 0 = there is none
    uint16_t tag = 0;
  };
  static uint16_t tag_of(uint64_t hash) { return static_cast<uint16_t>(hash >> 24); }
  void make_room() {
    slots_.assign(slots_.size() < kMax ? slots_.size() * 2 : kMax, {});
    entries_.clear();
  }

  std::vector<Slot> slots_ = std::vector<Slot>(kFirst);
  std::vector<Entry> entries_;
};

}  // namespace oomdiag
