#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocator/address_map.h"
#include "profiler/replay/allocator/rounding.h"

namespace oomdiag {

/// A piece of a segment, as the caching allocator keeps it.
struct Block {
  enum class State : uint8_t { free, live, pending_free, border };
  static constexpr uint32_t kNone = ~uint32_t{0};
  static constexpr uint32_t kInitial = uint32_t{1} << 31;  ///< marks an `event` that indexes the trace's `initial`

  uint64_t address = 0;
  int64_t bytes = 0;  ///< of the block, rounded
  int64_t requested_bytes = 0;
  uint64_t stream = 0;
  uint32_t previous = kNone, next = kNone;  ///< neighbours inside the segment
  uint32_t event = kNone;                   ///< index of the alloc event that made it live
  uint32_t context = 0;                     ///< of that event
  State state = State::free;
  uint8_t pool = 0;         ///< that the segment belongs to: 0, or a private one, which serves nobody else
  bool small = false;       ///< of the small blocks' part of it
  bool expandable = false;  ///< of a segment that is mapped piecewise
  bool placed = false;      ///< inside a segment that the replay has seen; if not, its size is only the rounding rule's
};

/// A layout is described by at most 2^16 blocks; a damaged trace may say anything.
inline constexpr uint64_t kMaxLayoutEvents = uint64_t{1} << 18;

/// The blocks of one device: replays the allocator's events and so knows the size of every block.
class Blocks {
 public:
  explicit Blocks(const AllocatorSettings& settings) : settings_(settings) {}

  /// Starts from blocks that are in use; their segments are known only as far as `layout` tells.
  void start_from(std::span<const Event> initial, std::span<const Event> layout, uint8_t device);
  /// Applies an alloc, free or segment event; `index` is remembered with the block that it makes.
  void apply(const Event& event, uint32_t index);
  /// Replaces everything by the layout that segment_state and block_state events of `device` describe; blocks that were
  /// known keep their alloc events.
  void adopt(std::span<const Event> layout, uint8_t device);
  /// Sets what the driver's bookkeeping says, for traces that begin in the middle.
  void set_reserved_bytes(int64_t bytes) { reserved_bytes_ = bytes; }

  int64_t allocated_bytes() const { return allocated_bytes_; }
  int64_t pending_bytes() const { return pending_bytes_; }
  int64_t reserved_bytes() const;

  /// The live blocks and those pending free, in no order.
  std::vector<Block> in_use() const;
  /// The live block at this address, or nullptr.
  const Block* live_at(uint64_t address) const;
  /// Every block of every segment that was seen, each segment in one piece and in address order.
  std::vector<std::vector<Block>> by_segment() const;

 private:
  void allocate(const Event& event, uint32_t index);
  void place(Block& block, const Event& event, uint32_t index);
  void allocate_unplaced(const Event& event, uint32_t index);
  void request_free(uint64_t address);
  void complete_free(uint64_t address);
  void add_segment(const Event& event);
  void remove_segment(const Event& event);
  void map(const Event& event);
  void unmap(const Event& event);
  bool split(uint32_t id, int64_t bytes);
  void merge_next(uint32_t id);
  void end_with_border(uint32_t id);
  uint32_t containing_free(uint64_t address) const;

  uint32_t add(const Block& block);
  void drop(uint32_t id);
  uint32_t find(uint64_t address) const;
  void link(uint32_t left, uint32_t right);
  void set_free(uint32_t id);
  bool is_free(uint32_t id) const { return id != Block::kNone && blocks_[id].state == Block::State::free; }

  AllocatorSettings settings_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> unused_;              ///< places in blocks_ that may be taken again
  AddressMap<uint32_t> at_;                   ///< block by address
  std::map<uint64_t, uint32_t> free_mapped_;  ///< free blocks of expandable segments, by address
  int64_t allocated_bytes_ = 0;
  int64_t pending_bytes_ = 0;
  int64_t reserved_bytes_ = 0;
};

}  // namespace oomdiag
