#include "profiler/replay/allocator/blocks.h"

#include <algorithm>

// Why replay split and merge? Events carry the bytes that were *requested*. What the card loses is the block, and a block
// can be up to 1 MiB larger than its request, depending on what was free at that address just then. Rounding alone is off
// by up to 25 MB in a real run; doing what the allocator did is exact to the byte.
//
//   segment_alloc 20 MiB        [------------------- free -------------------]
//   alloc 3 MiB at its start    [ live 3 ][------------- free 17 ------------]   split: more than 1 MiB is left
//   alloc 16.5 MiB behind it    [ live 3 ][------------- live 17 ------------]   0.5 MiB is left: not split, it keeps 17
//   free_completed of the first [ free 3 ][------------- live 17 ------------]
//   free_completed of the other [------------------- free -------------------]   merged with its free neighbour
//
// The allocator always hands out the *front* of a free block, so an alloc event finds its free block by address alone:
// one hash look-up, and neighbours are links, as in PyTorch. A block leaves `allocated` when its free is requested, and
// can be used or merged again when it is completed (later, if another stream still uses it).
//
// Blocks in segments that were never seen (a trace that begins in the middle) are `unplaced`: rounded, never merged.

namespace oomdiag {

using State = Block::State;

void Blocks::start_from(std::span<const Event> initial, std::span<const Event> layout, uint8_t device) {
  for (size_t i = 0; i < initial.size(); ++i) {
    if (initial[i].device == device) allocate_unplaced(initial[i], Block::kInitial | static_cast<uint32_t>(i));
  }
  reserved_bytes_ = allocated_bytes_;  // at least
  if (!layout.empty()) adopt(layout, device);
}

void Blocks::apply(const Event& event, uint32_t index) {
  const bool sane = event.bytes >= 0 && event.bytes <= kMaxSaneBytes && allocated_bytes_ + pending_bytes_ < kMaxBytes &&
                    reserved_bytes_ < kMaxBytes;
  if (!sane) return;
  switch (event.kind) {
    case EventKind::alloc:
      return allocate(event, index);
    case EventKind::free_requested:
      request_free(event.address);
      if ((event.flags & kFreeCompleted) != 0) complete_free(event.address);
      return;
    case EventKind::free_completed:
      return complete_free(event.address);
    case EventKind::segment_alloc:
      return add_segment(event);
    case EventKind::segment_free:
      return remove_segment(event);
    case EventKind::segment_map:
      return map(event);
    case EventKind::segment_unmap:
      return unmap(event);
    case EventKind::none:
    case EventKind::out_of_memory:
    case EventKind::device_memory:
    case EventKind::memory_stats:
    case EventKind::segment_state:
    case EventKind::block_state:
    case EventKind::wanted:
    case EventKind::op_failed:
    case EventKind::scope_begin:
    case EventKind::scope_end:
    case EventKind::nodes_created:
    case EventKind::graph_begin:
    case EventKind::saved_tensor:
    case EventKind::packed_tensor:
    case EventKind::parameter:
    case EventKind::buffer:
    case EventKind::gradient:
    case EventKind::note:
    case EventKind::stack:
    case EventKind::driver_alloc:
    case EventKind::driver_map:
    case EventKind::driver_free:
    case EventKind::card_step:
    case EventKind::card_process:
    case EventKind::grouped:
    case EventKind::referrer:
      return;
  }
}

int64_t Blocks::reserved_bytes() const { return std::max(reserved_bytes_, allocated_bytes_ + pending_bytes_); }

std::vector<Block> Blocks::in_use() const {
  std::vector<Block> result;
  for (const Block& block : blocks_) {
    if (block.state == State::live || block.state == State::pending_free) result.push_back(block);
  }
  return result;
}

const Block* Blocks::live_at(uint64_t address) const {
  const uint32_t id = find(address);
  return id != Block::kNone && blocks_[id].state == State::live ? &blocks_[id] : nullptr;
}

void Blocks::allocate(const Event& event, uint32_t index) {
  const uint32_t id = find(event.address);
  if (is_free(id)) {
    const int64_t rounded = round_size(event.bytes, settings_);
    const Block& block = blocks_[id];
    const bool expandable = block.expandable || settings_.expandable_segments;
    if (splits(rounded, block.bytes - rounded, block.small, expandable, settings_)) split(id, rounded);
    return place(blocks_[id], event, index);
  }
  // A free or a segment went unrecorded: whatever was here is gone.
  if (id != Block::kNone) {
    complete_free(event.address);
    if (is_free(find(event.address))) return allocate(event, index);
  }
  if (find(event.address) == Block::kNone) allocate_unplaced(event, index);
}

void Blocks::place(Block& block, const Event& event, uint32_t index) {
  if (block.expandable) free_mapped_.erase(block.address);
  block.state = State::live;
  block.requested_bytes = event.bytes;
  block.event = index;
  block.context = event.context;
  allocated_bytes_ += block.bytes;
}

void Blocks::allocate_unplaced(const Event& event, uint32_t index) {
  if (find(event.address) != Block::kNone) return;
  const int64_t bytes = round_size(event.bytes, settings_);
  add({.address = event.address,
       .bytes = bytes,
       .requested_bytes = event.bytes,
       .stream = event.detail,
       .event = index,
       .context = event.context,
       .state = State::live,
       .pool = pool_of(event.flags),
       .small = bytes <= kSmallBytes});
  allocated_bytes_ += bytes;
}

void Blocks::request_free(uint64_t address) {
  const uint32_t id = find(address);
  if (id == Block::kNone || blocks_[id].state != State::live) return;
  blocks_[id].state = State::pending_free;
  allocated_bytes_ -= blocks_[id].bytes;
  pending_bytes_ += blocks_[id].bytes;
}

void Blocks::complete_free(uint64_t address) {
  request_free(address);
  const uint32_t id = find(address);
  if (id == Block::kNone || blocks_[id].state != State::pending_free) return;
  pending_bytes_ -= blocks_[id].bytes;
  if (!blocks_[id].placed) return drop(id);
  const uint32_t previous = blocks_[id].previous;
  set_free(id);
  merge_next(id);
  if (is_free(previous)) merge_next(previous);
}

// Cuts a free block in two. False if something unplaced lies where the second would begin: the trace is damaged.
bool Blocks::split(uint32_t id, int64_t bytes) {
  Block rest = blocks_[id];
  rest.address += static_cast<uint64_t>(bytes);
  rest.bytes -= bytes;
  if (find(rest.address) != Block::kNone) return false;
  const uint32_t next = rest.next;
  rest.previous = rest.next = Block::kNone;
  blocks_[id].bytes = bytes;
  const uint32_t rest_id = add(rest);
  set_free(rest_id);
  link(id, rest_id);
  link(rest_id, next);
  return true;
}

void Blocks::merge_next(uint32_t id) {
  const uint32_t next = blocks_[id].next;
  if (!is_free(next)) return;
  blocks_[id].bytes += blocks_[next].bytes;
  link(id, blocks_[next].next);
  drop(next);
}

uint32_t Blocks::add(const Block& block) {
  auto id = static_cast<uint32_t>(blocks_.size());
  if (unused_.empty()) {
    blocks_.push_back(block);
  } else {
    id = unused_.back();
    unused_.pop_back();
    blocks_[id] = block;
  }
  at_[block.address] = id;
  return id;
}

void Blocks::drop(uint32_t id) {
  at_.erase(blocks_[id].address);
  if (blocks_[id].expandable) free_mapped_.erase(blocks_[id].address);
  blocks_[id] = {};
  unused_.push_back(id);
}

uint32_t Blocks::find(uint64_t address) const {
  const uint32_t* id = at_.find(address);
  return id == nullptr ? Block::kNone : *id;
}

void Blocks::link(uint32_t left, uint32_t right) {
  if (left != Block::kNone) blocks_[left].next = right;
  if (right != Block::kNone) blocks_[right].previous = left;
}

void Blocks::set_free(uint32_t id) {
  blocks_[id].state = State::free;
  if (blocks_[id].expandable) free_mapped_[blocks_[id].address] = id;
}

}  // namespace oomdiag
