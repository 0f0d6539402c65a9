#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "profiler/trace/live_table.h"
#include "profiler/trace/mix.h"

namespace oomdiag {

/// A hash map of at most `kCapacity` entries in pages of its own, for use inside the driver's calls: it neither allocates nor
/// throws. Keys are not 0. Calls must not overlap.
template <typename Value>
class FixedMap {
 public:
  static constexpr size_t kCapacity = size_t{1} << 16;

  FixedMap() : pages_(2 * kCapacity * sizeof(Entry)) {}

  /// The value of `key`, null if there is none.
  Value* find(uint64_t key) noexcept {
    Entry* entry = place_of(key);
    return entry != nullptr && entry->key == key ? &entry->value : nullptr;
  }
  /// Sets the value of `key`. False when the map is full, or there are no pages.
  bool insert(uint64_t key, const Value& value) noexcept {
    Entry* entry = place_of(key);
    if (entry == nullptr || key == 0 || (entry->key == 0 && used_ == kCapacity)) return false;
    if (entry->key == 0) ++used_;
    *entry = {key, value};
    return true;
  }
  void erase(uint64_t key) noexcept {
    Entry* entry = place_of(key);
    if (entry == nullptr || entry->key == 0) return;
    entry->key = 0;
    --used_;
    close_gap(static_cast<size_t>(entry - entries()));
  }
  /// Erases the entries whose value `is_erased(value)` says true of. Each is asked about at least once; of those that stay, some
  /// twice.
  template <typename IsErased>
  void erase_if(IsErased is_erased) {
    if (entries() == nullptr) return;
    for (size_t i = 0; i < kPlaces && used_ > 0; ++i) {
      while (entries()[i].key != 0 && is_erased(std::as_const(entries()[i].value))) erase(entries()[i].key);
    }
  }
  size_t size() const { return used_; }

  /// Calls `visit(key, value)` for every entry; `visit` must not change the map.
  template <typename Visit>
  void for_each(Visit visit) {
    if (entries() == nullptr || used_ == 0) return;
    for (size_t i = 0; i < kPlaces; ++i) {
      if (entries()[i].key != 0) visit(entries()[i].key, entries()[i].value);
    }
  }

 private:
  static constexpr size_t kPlaces = 2 * kCapacity;  // so that half of them are free
  struct Entry {
    uint64_t key;
    Value value;
  };

  Entry* entries() const { return static_cast<Entry*>(pages_.data()); }
  static size_t home(uint64_t key) { return spread(key) >> (64 - 17); }
  static_assert(kPlaces == size_t{1} << 17);

  Entry* place_of(uint64_t key) noexcept {
    if (entries() == nullptr) return nullptr;
    size_t i = home(key);
    while (entries()[i].key != 0 && entries()[i].key != key) i = (i + 1) % kPlaces;
    return &entries()[i];
  }

  // Entries behind a gap move up, or searches would end at it.
  void close_gap(size_t gap) noexcept {
    for (size_t i = (gap + 1) % kPlaces; entries()[i].key != 0; i = (i + 1) % kPlaces) {
      const size_t from_home = (i - home(entries()[i].key)) % kPlaces;
      if (from_home < (i - gap) % kPlaces) continue;
      std::swap(entries()[gap], entries()[i]);
      gap = i;
    }
  }

  PrivatePages pages_;
  size_t used_ = 0;
};

}  // namespace oomdiag
