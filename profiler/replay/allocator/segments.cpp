#include <algorithm>
#include <iterator>

#include "profiler/event.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/rounding.h"

// Segments come and go as a whole, or, if they are expandable, page by page.
//
// Expandable segments grow and shrink: segment_map adds a free range, which joins a free neighbour. So that a new range
// finds its left neighbour by address too, each mapped range ends in an empty `border` block. segment_unmap cuts a piece
// out of a free block, perhaps from its middle; for that the free blocks of such segments are also kept in order.

namespace oomdiag {

using State = Block::State;

std::vector<std::vector<Block>> Blocks::by_segment() const {
  std::vector<std::vector<Block>> segments;
  for (const Block& head : blocks_) {
    if (!head.placed || head.previous != Block::kNone || head.state == State::border) continue;
    std::vector<Block>& segment = segments.emplace_back();
    segment.push_back(head);
    for (uint32_t id = head.next; id != Block::kNone; id = blocks_[id].next) {
      if (blocks_[id].state != State::border) segment.push_back(blocks_[id]);
    }
  }
  return segments;
}

void Blocks::add_segment(const Event& event) {
  if (const uint32_t old = id_at(event.address); old != Block::kNone) {
    if (blocks_[old].state != State::free) complete_free(old);
    if (id_at(event.address) != Block::kNone) remove_segment(event);
  }
  if (id_at(event.address) != Block::kNone) return;  // in the middle of a segment: damaged
  add({.address = event.address,
       .bytes = event.bytes,
       .stream = event.detail,
       .pool = pool_of(event.flags),
       .small = event.bytes == kSmallSegmentBytes,
       .placed = true});
  totals_.reserved_bytes += event.bytes;
}

void Blocks::remove_segment(const Event& event) {
  totals_.reserved_bytes -= std::min(event.bytes, totals_.reserved_bytes);
  uint32_t id = id_at(event.address);
  if (id == Block::kNone || blocks_[id].previous != Block::kNone || !blocks_[id].placed) return;
  while (id != Block::kNone) {
    const uint32_t next = blocks_[id].next;
    if (blocks_[id].state == State::live) totals_.allocated_bytes -= blocks_[id].bytes;
    if (blocks_[id].state == State::pending_free) totals_.pending_bytes -= blocks_[id].bytes;
    note_end(blocks_[id]);
    drop(id);
    id = next;
  }
}

void Blocks::map(const Event& event) {
  uint32_t id = id_at(event.address);
  if (id != Block::kNone && blocks_[id].state != State::border) return;
  if (event.bytes == 0) return;
  totals_.reserved_bytes += event.bytes;
  if (id == Block::kNone) id = add({.address = event.address, .expandable = true, .placed = true});
  Block& block = change(id);
  block.bytes = event.bytes;
  block.stream = event.detail;
  block.pool = pool_of(event.flags);
  set_free(id);
  end_with_border(id);
  merge_next(id);
  if (const uint32_t previous = blocks_[id].previous; is_free(previous)) merge_next(previous);
}

void Blocks::unmap(const Event& event) {
  totals_.reserved_bytes -= std::min(event.bytes, totals_.reserved_bytes);
  uint32_t id = containing_free(event.address);
  if (id == Block::kNone || event.bytes == 0) return;
  if (const auto before = static_cast<int64_t>(event.address - blocks_[id].address); before > 0) {
    if (!split(id, before)) return;
    id = blocks_[id].next;
  }
  if (blocks_[id].bytes > event.bytes && !split(id, event.bytes)) return;
  const uint32_t previous = blocks_[id].previous;
  const uint32_t next = blocks_[id].next;
  drop(id);
  if (next != Block::kNone) {
    change(next).previous = Block::kNone;
    if (blocks_[next].state == State::border) drop(next);
  }
  if (previous != Block::kNone) {
    change(previous).next = Block::kNone;
    end_with_border(previous);
  }
}

// Links `id`, the last block of a mapped range, to what is mapped behind it, or else to an empty block that waits there.
void Blocks::end_with_border(uint32_t id) {
  const uint64_t end = blocks_[id].address + static_cast<uint64_t>(blocks_[id].bytes);
  uint32_t next = id_at(end);
  if (next == Block::kNone) next = add({.address = end, .state = State::border, .expandable = true, .placed = true});
  if (next != id && blocks_[next].expandable && blocks_[next].previous == Block::kNone) link(id, next);
}

uint32_t Blocks::containing_free(uint64_t address) const {
  const auto after = free_mapped_.upper_bound(address);
  if (after == free_mapped_.begin()) return Block::kNone;
  const uint32_t id = std::prev(after)->second;
  const bool inside = address - blocks_[id].address < static_cast<uint64_t>(blocks_[id].bytes);
  return inside ? id : Block::kNone;
}

}  // namespace oomdiag
