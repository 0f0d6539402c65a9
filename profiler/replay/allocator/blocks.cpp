#include "profiler/replay/allocator/blocks.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"

// Why replay split and merge? Events carry the bytes that were *requested*. What the GPU loses is the block, and a block
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
//
// The layout at the peak is asked for, and that a moment was the peak is known only at the end. A copy of all blocks at each
// higher point would cost more than the replay (a step has hundreds of them). So the blocks of the newest mark are known by
// what has changed since: each block that changes is copied once, as it was, and given back by marked().

namespace oomdiag {

using State = Block::State;

void Blocks::start_from(std::span<const Event> initial, std::span<const Event> layout, uint8_t device) {
  for (size_t i = 0; i < initial.size(); ++i) {
    if (initial[i].device == device) allocate_unplaced(initial[i], Block::kInitial | static_cast<uint32_t>(i));
  }
  totals_.reserved_bytes = totals_.allocated_bytes;  // at least
  if (!layout.empty()) adopt(layout, device);
}

const Block* Blocks::apply(const Event& event, const Block* at, uint32_t tag) {
  ended_.clear();
  const bool sane = event.bytes >= 0 && event.bytes <= kMaxSaneBytes &&
                    totals_.allocated_bytes + totals_.pending_bytes < kMaxBytes && totals_.reserved_bytes < kMaxBytes;
  if (!sane) return nullptr;
  const uint32_t id = at == nullptr ? Block::kNone : id_of(*at);
  const EventKind kind = event.kind;
  if (kind == EventKind::alloc) return allocate(event, id, tag);
  if (kind == EventKind::free_requested || kind == EventKind::free_completed) {
    completes_free(event) ? complete_free(id) : request_free(id);
    return nullptr;
  }
  if (kind == EventKind::segment_alloc) add_segment(event);
  if (kind == EventKind::segment_free) remove_segment(event);
  if (kind == EventKind::segment_map) map(event);
  if (kind == EventKind::segment_unmap) unmap(event);
  return nullptr;
}

int64_t Blocks::reserved_bytes() const {
  return std::max(totals_.reserved_bytes, totals_.allocated_bytes + totals_.pending_bytes);
}

std::vector<Block> Blocks::in_use() const {
  std::vector<Block> result;
  std::copy_if(blocks_.begin(), blocks_.end(), std::back_inserter(result),
               [](const Block& block) { return block.is_in_use(); });
  return result;
}

void Blocks::mark() {
  ++version_;
  marked_ = blocks_.size();
  marked_totals_ = totals_;
  before_.clear();
}

Blocks Blocks::marked() const {
  Blocks then(settings_);
  then.blocks_.assign(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(marked_));
  for (const auto& [id, block] : before_) then.blocks_[id] = block;
  then.totals_ = marked_totals_;
  return then;
}

const Block* Blocks::allocate(const Event& event, uint32_t id, uint32_t tag) {
  if (is_free(id)) {
    const int64_t rounded = round_size(event.bytes, settings_);
    const Block& block = blocks_[id];
    const bool expandable = block.expandable || settings_.expandable_segments;
    if (splits(rounded, block.bytes - rounded, block.small, expandable, settings_)) split(id, rounded);
    Block& placed = change(id);
    if (placed.expandable) free_mapped_.erase(placed.address);
    placed.state = State::live;
    placed.requested_bytes = event.bytes;
    placed.tag = tag;
    totals_.allocated_bytes += placed.bytes;
    return &placed;
  }
  // A free or a segment went unrecorded: whatever was here is gone.
  if (id != Block::kNone) {
    complete_free(id);
    if (const uint32_t now = id_at(event.address); is_free(now)) return allocate(event, now, tag);
  }
  return allocate_unplaced(event, tag);
}

const Block* Blocks::allocate_unplaced(const Event& event, uint32_t tag) {
  if (find(event.address) != nullptr) return nullptr;
  const int64_t bytes = round_size(event.bytes, settings_);
  totals_.allocated_bytes += bytes;
  return &blocks_[add({.address = event.address,
                       .bytes = bytes,
                       .requested_bytes = event.bytes,
                       .stream = event.detail,
                       .tag = tag,
                       .state = State::live,
                       .pool = pool_of(event.flags),
                       .small = bytes <= kSmallBytes})];
}

void Blocks::request_free(uint32_t id) {
  if (id == Block::kNone || blocks_[id].state != State::live) return;
  change(id).state = State::pending_free;
  totals_.allocated_bytes -= blocks_[id].bytes;
  totals_.pending_bytes += blocks_[id].bytes;
}

void Blocks::complete_free(uint32_t id) {
  if (id == Block::kNone || !blocks_[id].is_in_use()) return;
  const bool was_live = blocks_[id].state == State::live;
  (was_live ? totals_.allocated_bytes : totals_.pending_bytes) -= blocks_[id].bytes;
  note_end(blocks_[id]);
  if (!blocks_[id].placed) return drop(id);
  const uint32_t previous = blocks_[id].previous;
  set_free(id);
  merge_next(id);
  if (is_free(previous)) merge_next(previous);
}

void Blocks::note_end(const Block& block) {
  if (block.tag != Block::kNone) ended_.emplace_back(block.address, block.tag);
}

// Cuts a free block in two. False if something unplaced lies where the second would begin: the trace is damaged.
bool Blocks::split(uint32_t id, int64_t bytes) {
  const uint64_t address = blocks_[id].address + static_cast<uint64_t>(bytes);
  const auto [place, is_fresh] = at_.insert(address);
  if (!is_fresh) return false;
  const uint32_t rest_id = *place = take_place();
  Block& front = change(id);
  Block& rest = blocks_[rest_id];
  rest = front;  // of this version, as `rest` is
  rest.address = address;
  rest.bytes -= bytes;
  front.bytes = bytes;
  if (rest.expandable) free_mapped_[address] = rest_id;
  link(rest_id, rest.next);
  link(id, rest_id);
  return true;
}

void Blocks::merge_next(uint32_t id) {
  const uint32_t next = blocks_[id].next;
  if (!is_free(next)) return;
  change(id).bytes += blocks_[next].bytes;
  link(id, blocks_[next].next);
  drop(next);
}

uint32_t Blocks::add(const Block& block) {
  const uint32_t id = at_[block.address] = take_place();
  blocks_[id] = block;
  blocks_[id].version = version_;
  return id;
}

// A place for a block of this version.
uint32_t Blocks::take_place() {
  if (unused_.empty()) {
    blocks_.push_back({.version = version_});
    return static_cast<uint32_t>(blocks_.size() - 1);
  }
  const uint32_t id = unused_.back();
  unused_.pop_back();
  change(id);
  return id;
}

// What is left is a block of no segment that is not in use.
void Blocks::drop(uint32_t id) {
  Block& block = change(id);
  at_.erase(block.address);
  if (block.expandable) free_mapped_.erase(block.address);
  block.state = State::free;
  block.placed = false;
  unused_.push_back(id);
}

void Blocks::keep(uint32_t id) {
  if (id < marked_) before_.emplace_back(id, blocks_[id]);
  blocks_[id].version = version_;
}

uint32_t Blocks::id_at(uint64_t address) const {
  const Block* block = find(address);
  return block == nullptr ? Block::kNone : id_of(*block);
}

void Blocks::link(uint32_t left, uint32_t right) {
  if (left != Block::kNone) change(left).next = right;
  if (right != Block::kNone) change(right).previous = left;
}

void Blocks::set_free(uint32_t id) {
  Block& block = change(id);
  block.state = State::free;
  block.tag = Block::kNone;
  if (block.expandable) free_mapped_[block.address] = id;
}

SegmentLayout lay_out(std::span<const Block> segment) {
  SegmentLayout layout{.address = segment.front().address,
                       .stream = segment.front().stream,
                       .pool = segment.front().pool,
                       .small = segment.front().small,
                       .expandable = segment.front().expandable};
  std::vector<const Block*> used;
  for (const Block& block : segment) {
    layout.bytes += block.bytes;
    if (block.state == Block::State::free) {
      ++layout.holes;
      layout.largest_free_block_bytes = std::max(layout.largest_free_block_bytes, block.bytes);
    } else {
      layout.used_bytes += block.bytes;
      used.push_back(&block);
    }
  }
  std::sort(used.begin(), used.end(), [](const Block* a, const Block* b) { return a->bytes > b->bytes; });
  for (size_t i = 0; i < used.size() && i < 3; ++i) layout.blocked_by.push_back(used[i]->address);
  return layout;
}

}  // namespace oomdiag
