#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "extension/virtual_device/driver/free_ranges.h"

namespace oomdiag {

inline constexpr int64_t kPageBytes = 2 << 20;

constexpr int64_t round_to_pages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

/// Blocks of at most 1 MiB, which share pages: of cudaMalloc, and of a stream-ordered pool. It knows addresses only; who
/// owns the pages adds one where none has space, and takes one back that holds no block any more.
class SmallHeap {
 public:
  /// What is larger has pages of its own (pytorch/pytorch issue 17120 measured where that begins).
  static constexpr int64_t kMaxBytes = 1 << 20;
  static constexpr int64_t kAlignment = 512;  ///< of a block, and what it is rounded to

  static constexpr int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  static bool serves(int64_t bytes) { return bytes <= kMaxBytes; }

  /// The lowest place for a block; nullopt: add a page.
  std::optional<uintptr_t> take(int64_t bytes);
  void add_page(uintptr_t page) { free_.give(page, kPageBytes); }

  /// What a block takes of its page; 0 for no block of this heap.
  int64_t bytes_of(uintptr_t block) const;

  /// Frees a block. A page that has no other block is no longer the heap's, and is returned.
  std::optional<uintptr_t> give(uintptr_t block);

 private:
  FreeRanges free_{kPageBytes};
  std::unordered_map<uintptr_t, int64_t> blocks_;
};

}  // namespace oomdiag
