#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace oomdiag {

/// A set of pointers that any thread may ask at any time, and one at a time adds to. What finds no room is not in it.
class PointerSet {
 public:
  void add(const void* pointer) noexcept {
    for (size_t probe = 0; probe < kMostProbes; ++probe) {
      std::atomic<const void*>& slot = slots_[(first_of(pointer) + probe) % kSlots];
      if (slot.load(std::memory_order_relaxed) == pointer) return;
      if (slot.load(std::memory_order_relaxed) != nullptr) continue;
      return slot.store(pointer, std::memory_order_relaxed);
    }
  }
  bool contains(const void* pointer) const noexcept {
    for (size_t probe = 0; probe < kMostProbes; ++probe) {
      const void* found = slots_[(first_of(pointer) + probe) % kSlots].load(std::memory_order_relaxed);
      if (found == pointer || found == nullptr) return found != nullptr;
    }
    return false;
  }

 private:
  static constexpr size_t kSlots = 1 << 13, kMostProbes = 16;
  static size_t first_of(const void* pointer) noexcept {
    return static_cast<size_t>((reinterpret_cast<uint64_t>(pointer) * 0x9E3779B97F4A7C15u) >> 40);
  }

  std::atomic<const void*> slots_[kSlots] = {};
};

}  // namespace oomdiag
