#include <algorithm>
#include <tuple>
#include <utility>

#include "profiler/replay/allocator/blocks.h"

// The layout that the allocator itself told at an OOM replaces the replayed one. In a whole trace the two are the same; in
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

void Blocks::adopt(std::span<const Event> layout, uint8_t device) {
  AddressMap<std::pair<uint32_t, uint32_t>> makers;  // event and context
  for (const Block& block : in_use()) makers[block.address] = {block.event, block.context};
  *this = Blocks(settings_);

  const Event* segment = nullptr;
  uint32_t last = Block::kNone;
  for (const Event& event : layout) {
    if (event.device != device || allocated_bytes_ + pending_bytes_ > kMaxBytes || reserved_bytes_ > kMaxBytes)
      continue;
    if (event.kind == EventKind::segment_state) {
      if (last != Block::kNone && blocks_[last].expandable) end_with_border(last);
      segment = &event;
      last = Block::kNone;
      reserved_bytes_ += std::clamp<int64_t>(event.bytes, 0, kMaxSaneBytes);
    }
    if (event.kind != EventKind::block_state || segment == nullptr || event.bytes <= 0) continue;
    if (find(event.address) != Block::kNone) continue;
    Block block = block_of(event, *segment);
    if (const auto* maker = makers.find(block.address)) std::tie(block.event, block.context) = *maker;
    if (block.state == Block::State::live) allocated_bytes_ += block.bytes;
    if (block.state == Block::State::pending_free) pending_bytes_ += block.bytes;
    const uint32_t id = add(block);
    if (block.state == Block::State::free) set_free(id);
    if (last != Block::kNone) link(last, id);
    last = id;
  }
  if (last != Block::kNone && blocks_[last].expandable) end_with_border(last);
}

}  // namespace oomdiag
