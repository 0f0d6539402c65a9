#pragma once

#include <algorithm>
#include <cstdint>

#include "profiler/replay/allocator/settings.h"

// The sizes that PyTorch's caching allocator makes of a request (c10/cuda/CUDACachingAllocator.cpp, 2.6 to 2.15).
namespace oomdiag {

inline constexpr int64_t kMinBlockBytes = 512;
inline constexpr int64_t kSmallBytes = kMiB;  ///< rounded sizes up to this come from the small pool
inline constexpr int64_t kSmallSegmentBytes = 2 * kMiB;
inline constexpr int64_t kMinLargeBytes = 10 * kMiB;  ///< requests from here on get a segment of their own size
inline constexpr int64_t kRoundLargeBytes = 2 * kMiB;
/// No GPU has as much: larger figures come from a damaged file.
inline constexpr int64_t kMaxSaneBytes = int64_t{1} << 50;
constexpr int64_t sane_bytes(int64_t bytes) { return std::clamp<int64_t>(bytes, 0, kMaxSaneBytes); }
constexpr int64_t sane_bytes(uint64_t bytes) { return static_cast<int64_t>(std::min<uint64_t>(bytes, kMaxSaneBytes)); }
/// Sums stop here, so that a damaged file cannot make them overflow.
inline constexpr int64_t kMaxBytes = int64_t{1} << 60;

/// `DeviceCachingAllocator::round_size`: bytes of the block that a request needs.
int64_t round_size(int64_t requested_bytes, const AllocatorSettings& settings);

/// `DeviceCachingAllocator::get_allocation_size`: bytes asked of the driver when no cached block of `rounded_bytes` exists.
/// An expandable segment grows by whole pieces of 2 MiB (small pool) or 20 MiB.
int64_t segment_size(int64_t rounded_bytes, const AllocatorSettings& settings);

/// `DeviceCachingAllocator::should_split`: whether what is left of a block becomes a free block of its own. If not, the
/// request keeps it, so a large block may hold up to 1 MiB more than was asked for.
bool splits(int64_t rounded_bytes, int64_t remaining_bytes, bool small_pool, bool expandable,
            const AllocatorSettings& settings);

}  // namespace oomdiag
