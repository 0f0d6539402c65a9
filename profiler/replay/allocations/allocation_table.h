#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// An index of an event that never comes.
inline constexpr uint64_t kNoEvent = ~uint64_t{0};

/// A node of a traversed graph, which keeps a block for its backward.
struct SavingNode {
  uint64_t node_sequence = 0;
  uint32_t context = 0;
  uint32_t shape = 0;      ///< index of its name
  uint32_t graph = 0;      ///< which forward pass made the node, see graphs.h
  uint32_t traversal = 0;  ///< which traversal found it
  uint16_t node_thread = 0;
};

/// A block from its alloc to its free, and all that events say of it. Facts recorded for an earlier block at this address do
/// not apply. Times are indices of events. It begins a line of the processor's cache, and fills three.
struct alignas(64) Allocation {
  Event maker{};                            ///< its alloc event; empty where that is not known
  uint32_t event = Block::kNone;            ///< index of the maker, with Block::kInitial in the trace's `initial`
  uint32_t number = 0;                      ///< counts the allocations of all devices
  uint32_t views = 0;                       ///< how many views hold it: it outlives its block for them
  int64_t bytes = 0;                        ///< of the block, rounded
  uint64_t born = 0, died = kNoEvent;       ///< died: its free was requested
  uint64_t gradient_since = kNoEvent;       ///< when it was first named a gradient
  uint32_t name = 0, shape = 0, group = 0;  ///< indices of names
  uint32_t step = 0;           ///< in which it was allocated; 0 before the first one, and where it is not known
  uint32_t nth_in_op = 0;      ///< how many allocations of the same op call came before
  uint32_t nth_at_place = 0;   ///< … of the same place in the same forward pass
  uint32_t freed_at = 0;       ///< context of its free; of snapshots only
  uint32_t end_step = 0;       ///< in which it was freed, else the last one; likewise
  Phase phase = Phase::other;  ///< in which it was allocated
  uint8_t device = 0;
  bool attached = false;  ///< events may name it: of AllocationTable
  bool parameter = false, buffer = false, state = false, ever_saved = false;
  bool uncalled = false;             ///< a parameter, as a variable tells alone: none of its layers was called
  bool trained = false;              ///< a parameter of an optimizer that wants a gradient
  bool op_made_nodes = false;        ///< the op that made it recorded itself for backward
  bool died_in_op = false;           ///< freed by the op call, or the node, that made it
  bool died_in_optimizer = false;    ///< freed inside the optimizer step that made it
  bool freed_in_node = false;        ///< by an autograd node
  bool saved_before = false;         ///< earlier ones of its place were freed by an autograd node; of snapshots only
  bool freed_by_accumulate = false;  ///< by AccumulateGrad: it was added to a gradient
  std::vector<SavingNode> saving_nodes{};  ///< of the newest graph that keeps it

  bool alive() const { return died == kNoEvent; }
  /// Older than the events of the trace.
  bool is_initial() const { return event != Block::kNone && (event & Block::kInitial) != 0; }
  bool is_known() const { return event != Block::kNone; }
  /// The shape that an event named, else that in which the first of `nodes` saved it.
  uint32_t shape_or_saved(const std::vector<SavingNode>& nodes) const {
    return shape != 0 || nodes.empty() ? shape : nodes.front().shape;
  }
  bool first_in_op() const { return maker.call_id == 0 || nth_in_op == 0; }
};

/// The allocations of all devices: those that live, and those that views hold. The places of others are used again, so
/// memory follows what lives, however long the program runs.
class AllocationTable {
 public:
  static constexpr uint32_t kNone = Block::kNone;

  /// Adds and numbers an allocation of which nothing else is known.
  uint32_t add(uint8_t device);
  /// The number of the next allocation: those with smaller ones were there before.
  uint32_t next_number() const { return next_number_; }
  /// The block is gone: events name this allocation no more.
  void detach(uint32_t id);

  /// A view needs this allocation, or no longer does.
  void hold(uint32_t id) { ++allocations_[id].views; }
  void let_go(uint32_t id);
  void let_go(std::span<const uint32_t> ids);

  Allocation& operator[](uint32_t id) { return allocations_[id]; }
  const Allocation& operator[](uint32_t id) const { return allocations_[id]; }
  /// This device's allocations that live, of those with smaller numbers than `end`.
  std::vector<uint32_t> living(uint8_t device, uint32_t end) const;

 private:
  void retire(uint32_t id);

  std::vector<Allocation> allocations_;
  std::vector<uint32_t> unused_;
  uint32_t next_number_ = 0;
};

/// Allocations that are gone, for a view that needs them.
class HeldAllocations {
 public:
  void add(uint32_t id, AllocationTable& table) {
    table.hold(id);
    ids_.push_back(id);
  }
  void drop_all(AllocationTable& table) {
    for (const uint32_t id : ids_) table.let_go(id);
    ids_.clear();
  }
  const std::vector<uint32_t>& ids() const { return ids_; }

 private:
  std::vector<uint32_t> ids_;
};

}  // namespace oomdiag
