#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "profiler/trace/mix.h"

namespace oomdiag {

/// A set of pointers that any thread may ask at any time, and one at a time changes. What does not fit is not in it.
class PointerSet {
 public:
  void add(const void* pointer) noexcept {
    if (contains(pointer)) return;
    filter_[word_of(pointer)].fetch_or(bit_of(pointer), std::memory_order_relaxed);
    if (count_ < kFew && few_.add(pointer)) {
      ++count_;
    } else if (many_.add(pointer)) {
      are_many_.store(true, std::memory_order_release);
    }
  }
  void remove(const void* pointer) noexcept {
    if (!contains(pointer)) return;
    if (few_.remove(pointer)) {
      --count_;
    } else {
      many_.remove(pointer);
    }
    if (++removed_ % kFew == 0) make_filter();
  }
  bool contains(const void* pointer) const noexcept {
    if ((filter_[word_of(pointer)].load(std::memory_order_relaxed) & bit_of(pointer)) == 0) return false;
    if (few_.contains(pointer)) return true;
    return are_many_.load(std::memory_order_acquire) && many_.contains(pointer);
  }

 private:
  template <size_t slots>
  class Table {
   public:
    bool add(const void* pointer) noexcept {
      for (size_t probe = 0; probe < kMaxProbes; ++probe) {
        std::atomic<const void*>& slot = slots_[(first_of(pointer) + probe) % slots];
        const void* const found = slot.load(std::memory_order_relaxed);
        if (found != nullptr && found != gone()) continue;
        slot.store(pointer, std::memory_order_relaxed);
        return true;
      }
      return false;
    }
    bool remove(const void* pointer) noexcept {
      for (size_t probe = 0; probe < kMaxProbes; ++probe) {
        std::atomic<const void*>& slot = slots_[(first_of(pointer) + probe) % slots];
        if (slot.load(std::memory_order_relaxed) != pointer) continue;
        slot.store(gone(), std::memory_order_relaxed);
        return true;
      }
      return false;
    }
    bool contains(const void* pointer) const noexcept {
      for (size_t probe = 0; probe < kMaxProbes; ++probe) {
        const void* found = slots_[(first_of(pointer) + probe) % slots].load(std::memory_order_relaxed);
        if (found == pointer || found == nullptr) return found != nullptr;
      }
      return false;
    }

    template <class Visit>
    void for_each(Visit visit) const {
      for (const std::atomic<const void*>& slot : slots_) {
        const void* const pointer = slot.load(std::memory_order_relaxed);
        if (pointer != nullptr && pointer != gone()) visit(pointer);
      }
    }

   private:
    std::atomic<const void*> slots_[slots] = {};
  };

  /// In the place of a pointer that was removed: those behind it are still found.
  static const void* gone() noexcept {
    static const char mark = 0;
    return &mark;
  }
  // Who asks meanwhile finds what is in the set: its bits are in the old word and in the new one.
  void make_filter() noexcept {
    uint64_t filter[kWords] = {};
    const auto add = [&](const void* pointer) { filter[word_of(pointer)] |= bit_of(pointer); };
    few_.for_each(add);
    many_.for_each(add);
    for (size_t i = 0; i < kWords; ++i) filter_[i].store(filter[i], std::memory_order_relaxed);
  }

  static constexpr size_t kFew = 128, kMax = 1 << 13, kMaxProbes = 16, kWords = 8;
  static uint64_t hash_of(const void* pointer) noexcept { return spread(reinterpret_cast<uint64_t>(pointer)); }
  static size_t first_of(const void* pointer) noexcept { return static_cast<size_t>(hash_of(pointer) >> 40); }
  static size_t word_of(const void* pointer) noexcept { return hash_of(pointer) >> 61; }
  static uint64_t bit_of(const void* pointer) noexcept { return uint64_t{1} << (hash_of(pointer) >> 55 & 63); }

  /// A bit for each pointer: most that are asked for are not in the set, and one line of the processor's cache says so. They
  /// are asked for when all of this is out of the caches.
  alignas(64) std::atomic<uint64_t> filter_[kWords] = {};
  Table<4 * kFew> few_;  ///< one page
  Table<kMax - kFew> many_;
  size_t count_ = 0;    ///< in few_
  size_t removed_ = 0;  ///< so far
  std::atomic<bool> are_many_ = false;
};

}  // namespace oomdiag
