#include "profiler/replay/allocator/rounding.h"

#include <algorithm>
#include <bit>

#include "profiler/replay/allocator/settings.h"

namespace oomdiag {
namespace {

int64_t round_up(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

int64_t divisions_for(int64_t bytes, const AllocatorSettings& settings) {
  const auto megabytes = static_cast<uint64_t>(bytes / kMiB);
  const auto interval = megabytes == 0 ? 0 : static_cast<size_t>(std::bit_width(megabytes)) - 1;
  return settings.roundup_power2_divisions[std::min(interval, settings.roundup_power2_divisions.size() - 1)];
}

/// Up to the next of `divisions` equal steps between two powers of two (`roundup_power2_next_division`).
int64_t round_to_division(int64_t bytes, int64_t divisions) {
  const auto floor = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
  if (floor == bytes) return bytes;
  const int64_t step = floor / static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(divisions)));
  return step == 0 ? floor * 2 : round_up(bytes, step);
}

}  // namespace

int64_t round_size(int64_t requested_bytes, const AllocatorSettings& settings) {
  const int64_t bytes = std::clamp<int64_t>(requested_bytes, 0, kMaxSaneBytes);
  if (bytes < kMinBlockBytes) return kMinBlockBytes;
  const int64_t divisions = divisions_for(bytes, settings);
  if (divisions > 1 && bytes / divisions >= kMinBlockBytes && bytes > kMinBlockBytes * divisions) {
    return round_to_division(bytes, divisions);
  }
  return round_up(bytes, kMinBlockBytes);
}

int64_t segment_size(int64_t rounded_bytes, const AllocatorSettings& settings) {
  if (rounded_bytes <= kSmallBytes) return kSmallSegmentBytes;
  if (settings.expandable_segments) {
    return round_up(std::min(rounded_bytes, kMaxSaneBytes), std::max(kRoundLargeBytes, settings.large_segment_bytes));
  }
  if (rounded_bytes < kMinLargeBytes) return settings.large_segment_bytes;
  return round_up(std::min(rounded_bytes, kMaxSaneBytes), kRoundLargeBytes);
}

bool splits(int64_t rounded_bytes, int64_t remaining_bytes, bool small_pool, bool expandable,
            const AllocatorSettings& settings) {
  if (small_pool || expandable) return remaining_bytes >= kMinBlockBytes;
  return rounded_bytes < settings.max_split_bytes && remaining_bytes > kSmallBytes;
}

}  // namespace oomdiag
