#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocator/address_map.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// A piece of a segment, as the caching allocator keeps it.
struct Block {
  enum class State : uint8_t { free, live, pending_free, border };
  static constexpr uint32_t kNone = ~uint32_t{0};
  static constexpr uint32_t kInitial = uint32_t{1} << 31;  ///< marks a `tag` that indexes the trace's `initial`

  uint64_t address = 0;
  int64_t bytes = 0;  ///< of the block, rounded
  int64_t requested_bytes = 0;
  uint64_t stream = 0;
  uint32_t previous = kNone, next = kNone;  ///< neighbours inside the segment
  uint32_t tag = kNone;                     ///< what the caller names its allocation by, while it is in use
  uint32_t version = 0;                     ///< of Blocks: when it last changed
  State state = State::free;
  uint8_t pool = 0;         ///< that the segment belongs to: 0, or a private one, which serves nobody else
  bool small = false;       ///< of the small blocks' part of it
  bool expandable = false;  ///< of a segment that is mapped piecewise
  bool placed = false;      ///< inside a segment that the replay has seen; if not, its size is only the rounding rule's

  bool is_in_use() const { return state == State::live || state == State::pending_free; }
};

/// Whether the memory that this free_requested or free_completed event is of can be used again.
inline bool completes_free(const Event& event) {
  return event.kind == EventKind::free_completed || (event.flags & kFreeCompleted) != 0;
}

/// A layout is described by at most 2^16 blocks; a damaged trace may say anything.
inline constexpr uint64_t kMaxLayoutEvents = uint64_t{1} << 18;

/// The blocks of one device: replays the allocator's events and so knows the size of every block.
class Blocks {
 public:
  explicit Blocks(const AllocatorSettings& settings) : settings_(settings) {}

  /// Starts from blocks that are in use; their segments are known only as far as `layout` tells. Their tags are kInitial and
  /// the index in `initial`.
  void start_from(std::span<const Event> initial, std::span<const Event> layout, uint8_t device);
  /// Applies an alloc, free or segment event. The block that an alloc made live, valid until the next event, to be named by
  /// `tag`; nullptr where it made none, and for other events.
  const Block* apply(const Event& event, uint32_t tag = Block::kNone) { return apply(event, find(event.address), tag); }
  /// The same; `at`: what find() says of the event's address.
  const Block* apply(const Event& event, const Block* at, uint32_t tag);
  /// Replaces everything by the layout that segment_state and block_state events of `device` describe; blocks that were
  /// known keep their tags.
  void adopt(std::span<const Event> layout, uint8_t device);
  /// The block that begins at `address`, nullptr if none does.
  const Block* find(uint64_t address) const {
    const uint32_t* id = at_.find(address);
    return id == nullptr ? nullptr : &blocks_[*id];
  }
  void set_tag(const Block& block, uint32_t tag) { change(id_of(block)).tag = tag; }
  /// Addresses and tags of the blocks that the last event, or layout, has ended: their memory is free.
  std::span<const std::pair<uint64_t, uint32_t>> ended() const { return ended_; }

  /// Remembers the blocks as they are, in place of those remembered before. Takes no time; later each block that changes
  /// is copied once.
  void mark();
  /// The blocks as they were marked. They can be looked at only.
  Blocks marked() const;
  /// Sets what the driver's bookkeeping says, for traces that begin in the middle.
  void set_reserved_bytes(int64_t bytes) { totals_.reserved_bytes = bytes; }

  int64_t allocated_bytes() const { return totals_.allocated_bytes; }
  int64_t pending_bytes() const { return totals_.pending_bytes; }
  int64_t reserved_bytes() const;

  /// The live blocks and those pending free, in no order.
  std::vector<Block> in_use() const;
  /// Every block of every segment that was seen, each segment in one piece and in address order.
  std::vector<std::vector<Block>> by_segment() const;

 private:
  const Block* allocate(const Event& event, uint32_t id, uint32_t tag);
  const Block* allocate_unplaced(const Event& event, uint32_t tag);
  void request_free(uint32_t id);
  void complete_free(uint32_t id);
  void note_end(const Block& block);
  void add_segment(const Event& event);
  void remove_segment(const Event& event);
  void map(const Event& event);
  void unmap(const Event& event);
  bool split(uint32_t id, int64_t bytes);
  void merge_next(uint32_t id);
  void end_with_border(uint32_t id);
  uint32_t containing_free(uint64_t address) const;
  void clear();

  /// The only way to change a block.
  Block& change(uint32_t id) {
    if (blocks_[id].version != version_) [[unlikely]]
      keep(id);
    return blocks_[id];
  }
  void keep(uint32_t id);
  uint32_t add(const Block& block);
  uint32_t take_place();
  void drop(uint32_t id);
  uint32_t id_at(uint64_t address) const;
  uint32_t id_of(const Block& block) const { return static_cast<uint32_t>(&block - blocks_.data()); }
  void link(uint32_t left, uint32_t right);
  void set_free(uint32_t id);
  bool is_free(uint32_t id) const { return id != Block::kNone && blocks_[id].state == Block::State::free; }

  struct Totals {
    int64_t allocated_bytes = 0, pending_bytes = 0, reserved_bytes = 0;
  };

  AllocatorSettings settings_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> unused_;              ///< places in blocks_ that may be taken again
  AddressMap<uint32_t> at_;                   ///< block by address
  std::map<uint64_t, uint32_t> free_mapped_;  ///< free blocks of expandable segments, by address
  Totals totals_;
  std::vector<std::pair<uint64_t, uint32_t>> ended_;
  uint32_t version_ = 0;  ///< how often they were marked
  size_t marked_ = 0;     ///< blocks_ that there were then
  Totals marked_totals_;
  std::vector<std::pair<uint32_t, Block>> before_;  ///< what has changed since, as it was
};

/// What a segment looks like whose blocks, in address order, are these.
SegmentLayout lay_out(std::span<const Block> segment);

}  // namespace oomdiag
