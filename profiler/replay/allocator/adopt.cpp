#include <algorithm>

#include "profiler/event.h"
#include "profiler/replay/allocator/address_map.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/rounding.h"

// The layout that the allocator itself reported at an OOM replaces the replayed one. In a whole trace the two are the same; in
// one that begins in the middle this is where sizes, holes and reserved bytes become exact.

namespace oomdiag {
namespace {

Block block_of(const Event& state, const Event& segment) {
  const bool live = (state.flags & kBlockAllocated) != 0;
  const bool pending = (state.flags & kBlockPendingFree) != 0;
  return {.address = state.address,
          .bytes = std::clamp<int64_t>(state.bytes, 0, kMaxSaneBytes),
          .requested_bytes = static_cast<int64_t>(std::min<uint64_t>(state.detail, kMaxSaneBytes)),
          .stream = segment.detail,
          .state = live      ? Block::State::live
                   : pending ? Block::State::pending_free
                             : Block::State::free,
          .pool = pool_of(segment.flags),
          .small = (segment.flags & kSegmentLarge) == 0,
          .expandable = (segment.flags & kSegmentExpandable) != 0,
          .placed = true};
}

}  // namespace

// Forgets all blocks; their places are taken again from the first one on.
void Blocks::clear() {
  ended_.clear();
  at_.clear();
  free_mapped_.clear();
  totals_ = {};
  unused_.clear();
  for (auto id = static_cast<uint32_t>(blocks_.size()); id-- > 0;) drop(id);
}

void Blocks::adopt(std::span<const Event> layout, uint8_t device) {
  AddressMap<uint32_t> tags;
  for (const Block& block : in_use()) tags[block.address] = block.tag;
  clear();

  const Event* segment = nullptr;
  uint32_t last = Block::kNone;
  for (const Event& event : layout) {
    if (event.device != device || totals_.allocated_bytes + totals_.pending_bytes > kMaxBytes ||
        totals_.reserved_bytes > kMaxBytes)
      continue;
    if (event.kind == EventKind::segment_state) {
      if (last != Block::kNone && blocks_[last].expandable) end_with_border(last);
      segment = &event;
      last = Block::kNone;
      totals_.reserved_bytes += std::clamp<int64_t>(event.bytes, 0, kMaxSaneBytes);
    }
    if (event.kind != EventKind::block_state || segment == nullptr || event.bytes <= 0) continue;
    if (find(event.address) != nullptr) continue;
    Block block = block_of(event, *segment);
    if (block.state == Block::State::live) totals_.allocated_bytes += block.bytes;
    if (block.state == Block::State::pending_free) totals_.pending_bytes += block.bytes;
    if (block.is_in_use()) block.tag = tags.take(block.address).value_or(Block::kNone);
    const uint32_t id = add(block);
    if (block.state == Block::State::free) set_free(id);
    if (last != Block::kNone) link(last, id);
    last = id;
  }
  if (last != Block::kNone && blocks_[last].expandable) end_with_border(last);
  tags.for_each([&](uint64_t address, uint32_t tag) { note_end({.address = address, .tag = tag}); });
}

}  // namespace oomdiag
