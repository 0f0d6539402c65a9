#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"

namespace oomdiag {

/// PyTorch's caching allocator on one device: best fit among the free blocks of a pool, else a new segment or new pages; when
/// the device is full, what is cached goes back to it (c10/cuda/CUDACachingAllocator.cpp, 2.6 to 2.15). Blocks are named by the
/// number that allocate() returns. A millisecond for some ten thousand requests.
class AllocatorSimulator {
 public:
  static constexpr uint32_t kRefused = ~uint32_t{0};

  /// `available_bytes`: what PyTorch may take of the device.
  AllocatorSimulator(int64_t available_bytes, const AllocatorSettings& settings);

  /// A block for this request. Blocks of one `group`, a stream within a pool, serve no other; kRefused where the device is full
  /// even after the cache was given back.
  uint32_t allocate(int64_t requested_bytes, uint32_t group = 0);
  /// The block no longer counts as allocated; nobody may have its memory yet.
  void request_free(uint32_t block);
  /// … and now somebody may.
  void complete_free(uint32_t block);
  void free(uint32_t block) {
    request_free(block);
    complete_free(block);
  }
  /// What torch.cuda.empty_cache() does.
  void release_cached();

  int64_t allocated_bytes() const { return allocated_bytes_; }
  int64_t reserved_bytes() const { return reserved_bytes_; }
  int64_t peak_allocated_bytes() const { return peak_allocated_bytes_; }
  int64_t peak_reserved_bytes() const { return peak_reserved_bytes_; }
  /// How often the device was full and the cache was given back.
  uint32_t retries() const { return retries_; }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Piece {
    uint64_t address = 0;
    int64_t bytes = 0;
    uint32_t previous = kNone, next = kNone;  ///< neighbours within the segment
    uint32_t pool = 0;
    bool used = false, mapped = true;
  };
  using FreePiece = std::pair<int64_t, uint64_t>;  ///< bytes and address: PyTorch's order
  struct Pool {
    bool small = false;
    std::vector<std::pair<FreePiece, uint32_t>> free{};  ///< ascending; a few dozen mostly
    uint32_t range = kNone;                              ///< first piece of its expandable segment
  };

  uint32_t find_fit(const Pool& pool, int64_t bytes) const;
  int64_t bytes_after_growth(uint32_t piece) const;
  uint32_t grow(uint32_t pool, int64_t bytes);
  uint32_t add_segment(uint32_t pool, int64_t bytes);
  uint32_t grow_range(uint32_t pool, int64_t bytes);
  bool map(uint32_t piece, int64_t bytes);
  bool reserve(int64_t bytes);
  void unmap(uint32_t piece);
  uint32_t split(uint32_t piece, int64_t bytes);
  uint32_t merge(uint32_t piece);
  void insert_free(uint32_t piece);
  void erase_free(uint32_t piece);
  uint32_t add(const Piece& piece);
  void link(uint32_t left, uint32_t right);
  bool is_free(uint32_t piece) const { return piece != kNone && !pieces_[piece].used; }
  int64_t page_bytes(uint32_t pool) const {
    return pools_[pool].small ? kSmallSegmentBytes : settings_.large_segment_bytes;
  }

  int64_t available_bytes_;
  AllocatorSettings settings_;
  int64_t allocated_bytes_ = 0, reserved_bytes_ = 0, peak_allocated_bytes_ = 0, peak_reserved_bytes_ = 0;
  uint32_t retries_ = 0;
  uint64_t end_ = 0;  ///< of the addresses that were handed out
  std::vector<Piece> pieces_;
  std::vector<uint32_t> unused_;
  std::vector<Pool> pools_;  ///< the small and the large one of each group
};

}  // namespace oomdiag
