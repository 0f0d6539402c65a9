#include "profiler/snapshot/earlier_state.h"

#include <algorithm>

#include "profiler/event.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/snapshot/snapshot.h"

namespace oomdiag {

EarlierState::EarlierState(const AllocatorSettings& settings, std::span<const SnapshotSegment> segments, int device)
    : settings_(settings), device_(static_cast<uint8_t>(device)) {
  for (const SnapshotSegment& segment : segments) {
    if (segment.device != device) continue;
    add_range(segment.address, {std::clamp<int64_t>(segment.bytes, 0, kMaxSaneBytes), segment.stream, segment.large,
                                segment.expandable});
    for (const SnapshotBlock& block : segment.blocks) {
      if (block.state != SnapshotBlock::State::free && block.bytes > 0) blocks_[block.address] = block;
    }
  }
}

void EarlierState::rewind() {
  std::for_each(segment_events_.rbegin(), segment_events_.rend(), [&](const Event& event) { undo_segment(event); });
  for (const First& first : firsts_) {
    const int64_t bytes = std::clamp<int64_t>(first.bytes, 0, kMaxSaneBytes);
    if (first.kind == EventKind::alloc || first.made_later) blocks_.erase(first.address);
    if (first.kind == EventKind::alloc) continue;
    SnapshotBlock& block = blocks_[first.address];
    if (block.bytes == 0) block = {first.address, round_size(bytes, settings_), bytes};  // who made it is not known
    block.state =
        first.kind == EventKind::free_requested ? SnapshotBlock::State::allocated : SnapshotBlock::State::pending_free;
  }
}

void EarlierState::undo_segment(const Event& event) {
  const int64_t bytes = std::clamp<int64_t>(event.bytes, 0, kMaxSaneBytes);
  if (event.kind == EventKind::segment_alloc) ranges_.erase(event.address);
  if (event.kind == EventKind::segment_map) remove_range(event.address, bytes);
  if (event.kind == EventKind::segment_free) {
    add_range(event.address, {bytes, event.detail, bytes > kSmallSegmentBytes, false});
  }
  if (event.kind == EventKind::segment_unmap) add_range(event.address, {bytes, event.detail, true, true});
}

// Mapped pieces that touch are one.
void EarlierState::add_range(uint64_t address, Range range) {
  if (range.bytes == 0) return;
  if (range.expandable) {
    const auto after = ranges_.find(address + static_cast<uint64_t>(range.bytes));
    if (after != ranges_.end() && after->second.expandable) {
      range.bytes += after->second.bytes;
      range.large = after->second.large;
      ranges_.erase(after);
    }
    const auto next = ranges_.lower_bound(address);
    if (next != ranges_.begin()) {
      auto& [begin, before] = *std::prev(next);
      if (before.expandable && begin + static_cast<uint64_t>(before.bytes) == address) {
        before.bytes += range.bytes;
        return;
      }
    }
  }
  ranges_[address] = range;
}

void EarlierState::remove_range(uint64_t address, int64_t bytes) {
  auto found = ranges_.upper_bound(address);
  if (found == ranges_.begin()) return;
  --found;
  const uint64_t begin = found->first, end = begin + static_cast<uint64_t>(found->second.bytes);
  const uint64_t cut_end = address + static_cast<uint64_t>(bytes);
  if (cut_end > end) return;
  Range rest = found->second;
  found->second.bytes = static_cast<int64_t>(address - begin);
  if (found->second.bytes == 0) ranges_.erase(found);
  rest.bytes = static_cast<int64_t>(end - cut_end);
  if (rest.bytes > 0) ranges_[cut_end] = rest;
}

std::vector<Event> EarlierState::layout() const {
  std::vector<Event> events;
  for (const auto& [begin, range] : ranges_) {
    const auto flags =
        static_cast<uint16_t>((range.large ? kSegmentLarge : 0) | (range.expandable ? kSegmentExpandable : 0));
    const auto add = [&](EventKind kind, uint64_t address, int64_t bytes, uint64_t detail, uint16_t flag) {
      events.push_back(
          {.address = address, .bytes = bytes, .detail = detail, .kind = kind, .device = device_, .flags = flag});
    };
    add(EventKind::segment_state, begin, range.bytes, range.stream, flags);
    uint64_t at = begin;
    const uint64_t end = begin + static_cast<uint64_t>(range.bytes);
    for (auto block = blocks_.lower_bound(begin); block != blocks_.end() && block->first < end; ++block) {
      if (block->first < at) continue;  // overlaps: a size was guessed too large
      if (block->first > at) add(EventKind::block_state, at, static_cast<int64_t>(block->first - at), 0, 0);
      const auto next = std::next(block);
      const uint64_t space = (next != blocks_.end() && next->first < end ? next->first : end) - block->first;
      const auto bytes = static_cast<int64_t>(std::min(space, static_cast<uint64_t>(block->second.bytes)));
      const bool live = block->second.state == SnapshotBlock::State::allocated;
      add(EventKind::block_state, block->first, bytes, static_cast<uint64_t>(block->second.requested_bytes),
          live ? kBlockAllocated : kBlockPendingFree);
      at = block->first + static_cast<uint64_t>(bytes);
    }
    if (at < end) add(EventKind::block_state, at, static_cast<int64_t>(end - at), 0, 0);
  }
  return events;
}

std::vector<Event> EarlierState::blocks() const {
  std::vector<Event> events;
  for (const auto& [address, block] : blocks_) {
    events.push_back({.address = address,
                      .bytes = block.requested_bytes,
                      .context = block.place,
                      .kind = EventKind::alloc,
                      .device = device_});
  }
  return events;
}

}  // namespace oomdiag
