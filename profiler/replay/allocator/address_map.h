#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "profiler/trace/mix.h"

namespace oomdiag {

/// Hash map from 64-bit keys to small values, for the hot loops: one flat array, linear probing, no heap allocation once
/// it has grown. Pointers into it last until the next insertion or erasure.
template <class Value>
class AddressMap {
 public:
  AddressMap() : slots_(64) {}

  size_t size() const { return size_; }

  void clear() {
    slots_.assign(64, Slot{});
    size_ = 0;
  }

  const Value* find(uint64_t key) const {
    const Slot& slot = slots_[place_of(key)];
    return slot.used ? &slot.value : nullptr;
  }
  Value* find(uint64_t key) { return const_cast<Value*>(static_cast<const AddressMap*>(this)->find(key)); }

  /// The value of `key`, a fresh one if there was none yet, and whether it is fresh.
  std::pair<Value*, bool> insert(uint64_t key) {
    if (size_ * 2 >= slots_.size()) grow();
    Slot& slot = slots_[place_of(key)];
    const bool is_fresh = !slot.used;
    if (is_fresh) {
      slot.key = key;
      slot.value = {};
      slot.used = true;
      ++size_;
    }
    return {&slot.value, is_fresh};
  }
  Value& operator[](uint64_t key) { return *insert(key).first; }

  /// Erases `key`; the value that it had, if any.
  std::optional<Value> take(uint64_t key) {
    size_t hole = place_of(key);
    if (!slots_[hole].used) return std::nullopt;
    const Value value = slots_[hole].value;
    // Whatever was pushed past the hole moves back into it, so that no search ends early.
    for (size_t i = next(hole); slots_[i].used; i = next(i)) {
      const size_t home = home_of(slots_[i].key);
      if (((i - home) & mask()) < ((i - hole) & mask())) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole].used = false;
    --size_;
    return value;
  }
  void erase(uint64_t key) { take(key); }

  /// Calls `use` with each key and its value, in no order.
  template <class Use>
  void for_each(const Use& use) const {
    for (const Slot& slot : slots_) {
      if (slot.used) use(slot.key, slot.value);
    }
  }

 private:
  struct Slot {
    uint64_t key = 0;
    Value value{};
    bool used = false;
  };

  size_t mask() const { return slots_.size() - 1; }
  size_t next(size_t i) const { return (i + 1) & mask(); }
  size_t home_of(uint64_t key) const {
    return static_cast<size_t>(spread(key) >> 32) & mask();  // addresses differ in their middle bits
  }
  size_t place_of(uint64_t key) const {
    size_t i = home_of(key);
    while (slots_[i].used && slots_[i].key != key) i = next(i);
    return i;
  }
  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.used) slots_[place_of(slot.key)] = slot;
    }
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace oomdiag
