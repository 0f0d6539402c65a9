#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/evidence/allocation_reader.h"
#include "profiler/replay/evidence/graphs.h"
#include "profiler/replay/history.h"

// Two views of the table of allocations: what lives at one moment, and what lives in one step. That a moment was the peak, or a
// step the one that has it, is known only at the end: both are followed from their beginning and dropped when a higher point
// comes. What lives on is in the table anyway, so a view holds only the allocations that are gone since it began; these go on
// learning what later events say of them.
//
//   blocks ↑      ────────────            │ LiveSet: the blocks that live at this moment
//          │   ───────────────────────────┼──────
//          │         ─────── ─── ─────    │   ──────
//          └─────────|── StepCollector ───|───────→ events
namespace oomdiag {

/// The blocks of one device at one moment.
struct LiveSet {
  std::vector<Block> blocks{};          ///< in use, by address
  std::vector<uint32_t> allocations{};  ///< of each
  std::vector<SegmentLayout> segments{};
  int64_t allocated_bytes = 0, pending_bytes = 0, reserved_bytes = 0;
  ObservationWindow observed{};
  std::vector<std::vector<SavingNode>> saving_nodes{};  ///< of each block: the nodes that keep it at the moment
  bool saved_from_earlier_step = false;                 ///< they are taken from an earlier step
  bool walked_at_failure = false;                       ///< the graph was, as memory ran out: so they keep it then
};

/// The graph traversal that names the saving nodes may come after the moment of a LiveSet: this decides which one applies;
/// see graphs.h.
class LiveSetSavingNodes {
 public:
  /// At the moment of the live set. `own_traversal`: it is an OOM whose description holds a traversal.
  void begin(Phase phase, bool own_traversal, const Graphs& graphs);
  /// A traversal has begun, or backward has without one.
  void note_traversal(const Graphs& graphs);
  void note_backward() { waits_ = waits_ && own_traversal_; }
  /// The nodes of an allocation of the live set give way to those of another graph.
  void keep(uint32_t id, const Allocation& allocation);
  /// After the trace.
  void finish(const AllocationTable& table, LiveSet& live_set) const;

 private:
  std::vector<SavingNode> find(uint32_t id, const Allocation& allocation) const;

  bool waits_ = false, own_traversal_ = false;
  uint32_t traversal_ = 0;  ///< that tells; 0: none yet
  bool may_infer_ = false;
  std::shared_ptr<const SavedAllocations> alike_;
  uint64_t alike_began_ = kNoEvent;  ///< younger blocks may be found by alike_
  std::map<uint32_t, std::vector<SavingNode>> kept_;
};

/// The allocations of one device in one step. Of a step of very many blocks only those that live at high points are kept: it is
/// cut into windows of equally many allocations, which grow as the step does, and what lives at none of their highest
/// moments is let go. So the peak stays what it was.
class StepCollector {
 public:
  static constexpr size_t kMaxAllocations = size_t{1} << 16;

  /// The step begins, while so many allocations live. Nothing may be held of another one.
  void begin(uint32_t step, uint64_t index, size_t living, const AllocationTable& table, const Graphs& graphs);
  /// A block was made; then so many bytes were allocated.
  void add(uint64_t index, int64_t allocated_bytes, AllocationTable& table) {
    if (is_open_) add_high(index, allocated_bytes, table);
  }
  /// This allocation's free was requested, or its block is gone.
  void note_end(uint32_t id, AllocationTable& table) {
    const Allocation& allocation = table[id];
    if (allocation.number >= end_number_) return;
    if (is_open_ && !allocation.alive() && !highs_.empty() && allocation.born > highs_.back().index) {
      --count_;  // it lived at no high point
      return;
    }
    table.hold(id);
    gone_.push_back({id, allocation.born, allocation.died});
  }
  void note_traversal() { traversed_ = traversed_ || is_open_; }
  /// The step is over, or what is to be seen of it.
  void end(const ObservationWindow& observed, AllocationTable& table);
  /// The step is not asked for.
  void drop(AllocationTable& table);

  uint32_t step() const { return step_; }  ///< 0: none
  bool is_open() const { return is_open_; }
  uint64_t begins() const { return begins_; }
  const ObservationWindow& observed() const { return observed_; }
  /// Those that lived in the step, the oldest first.
  std::vector<uint32_t> allocations(uint8_t device, const AllocationTable& table) const;
  /// The nodes that keep this block in the step.
  std::vector<SavingNode> saving_nodes_of(const Allocation& allocation) const;

 private:
  struct High {
    uint64_t index = 0;
    int64_t bytes = 0;
  };
  /// An allocation that is gone, and of its row what says whether it stays: very many are looked at again and again.
  struct Gone {
    uint32_t id = 0;
    uint64_t born = 0, died = kNoEvent;
  };
  void add_high(uint64_t index, int64_t allocated_bytes, AllocationTable& table);
  void let_go_of_lower_point(AllocationTable& table);
  void thin(AllocationTable& table);
  void join_windows();
  bool lives_at_high_point(const Gone& gone) const;

  uint32_t step_ = 0;
  bool is_open_ = false, traversed_ = false;
  uint64_t begins_ = kNoEvent;
  uint32_t traversals_before_ = 0;
  std::shared_ptr<const SavedAllocations> alike_;
  ObservationWindow observed_{};
  uint32_t first_number_ = 0, end_number_ = 0;  ///< of its own allocations
  size_t count_ = 0;                            ///< of all that are kept, living ones too
  std::vector<Gone> gone_;                      ///< each is held
  size_t sure_ = 0;  ///< so many of them do not hang on the highest point of the newest window
  std::vector<High> highs_;
  uint64_t window_ = 1, in_window_ = 0;
  size_t limit_ = kMaxAllocations;
};

}  // namespace oomdiag
