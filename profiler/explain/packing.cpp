#include <algorithm>
#include <map>
#include <tuple>

#include "profiler/explain/explain.h"
#include "profiler/explain/findings.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

int64_t whole_pages(int64_t bytes) { return (bytes + kRoundLargeBytes - 1) / kRoundLargeBytes * kRoundLargeBytes; }

const LiveBlock* find_block(const MemoryState& state, uint64_t address) {
  const auto found = std::lower_bound(state.blocks.begin(), state.blocks.end(), address,
                                      [](const LiveBlock& block, uint64_t at) { return block.address < at; });
  return found != state.blocks.end() && found->address == address ? &*found : nullptr;
}

}  // namespace

Packing measure_packing(const MemoryState& state, int64_t total_bytes) {
  std::map<std::tuple<uint64_t, uint8_t, bool>, int64_t> used;  // blocks of one stream and pool can be packed together
  int64_t placed = 0;
  for (const SegmentLayout& segment : state.segments) {
    used[{segment.stream, segment.pool, segment.small}] += segment.used_bytes;
    placed += segment.used_bytes;
  }
  Packing packing{.load_bytes = state.allocated_bytes + state.pending_free_bytes,
                  .reserved_bytes = state.reserved_bytes,
                  .total_bytes = total_bytes};
  packing.pack_bytes = std::max<int64_t>(0, packing.load_bytes - placed);  // in segments that were never seen
  for (const auto& [pool, bytes] : used) packing.pack_bytes += whole_pages(bytes);
  packing.pack_bytes = std::clamp(packing.pack_bytes, packing.load_bytes, packing.reserved_bytes);
  return packing;
}

std::vector<BlockedSegment> find_blocked_segments(const MemoryState& state, size_t at_most) {
  std::vector<const SegmentLayout*> blocked;
  for (const SegmentLayout& segment : state.segments) {
    if (segment.used_bytes > 0 && segment.holes > 0) blocked.push_back(&segment);
  }
  std::sort(blocked.begin(), blocked.end(), [](const SegmentLayout* a, const SegmentLayout* b) {
    return std::tie(a->largest_free_block_bytes, b->address) > std::tie(b->largest_free_block_bytes, a->address);
  });
  if (blocked.size() > at_most) blocked.resize(at_most);

  std::vector<BlockedSegment> result;
  for (const SegmentLayout* segment : blocked) {
    BlockedSegment& one = result.emplace_back();
    one.bytes = segment->bytes;
    one.largest_free_block_bytes = segment->largest_free_block_bytes;
    one.used_bytes = segment->used_bytes;
    for (const uint64_t address : segment->blocked_by) {
      if (const LiveBlock* block = find_block(state, address)) one.blocked_by.push_back(*block);
    }
  }
  return result;
}

}  // namespace oomdiag
