#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/evidence/stack_rules.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Which events count for a view of allocations; indices of events.
struct ObservationWindow {
  uint64_t end = kNoEvent;                   ///< of what is viewed: what was freed before counts as freed
  uint64_t named_end = kNoEvent;             ///< gradient events from here on are ignored
  uint64_t unwound = kNoEvent;               ///< from a fatal OOM on frees say nothing: everything is unwound
  uint64_t optimizer_open_since = kNoEvent;  ///< scope_begin of an optimizer step that has not ended at `end`
  uint32_t failed_op = 0;                    ///< the op call that a fatal OOM ended
};

/// Says what allocations hold: the one place where evidence becomes a category.
class AllocationReader {
 public:
  /// `allocations`: all that are viewed together.
  AllocationReader(const Trace& trace, const NodeTable& nodes, const AllocationTable& table,
                   std::span<const uint32_t> allocations, const ObservationWindow& observed);

  /// `saved`: a node of the living graph keeps it.
  Category category_of(const Allocation& allocation, bool saved) const;
  /// The category that the stacks of a snapshot show, and how far that can be trusted.
  StackVerdict judge_by_stacks(const Allocation& allocation) const;
  Where made_of(const Allocation& allocation) const { return locate(trace_, nodes_, allocation.maker); }
  /// Made by a forward op that recorded itself for backward.
  bool is_in_graph(const Allocation& allocation) const {
    return allocation.phase == Phase::forward && op_made_nodes(allocation);
  }
  /// The nodes, each once, in forward's order.
  std::vector<Where> locate_saving_nodes(std::vector<SavingNode> saving_nodes) const;

 private:
  AllocationEvidence gather(const Allocation& allocation, bool saved) const;
  uint32_t marks_of(const Allocation& allocation) const;
  uint8_t fate_of(const Allocation& allocation, uint32_t marks) const;
  bool is_bucket(const Context& context, int64_t bytes) const;
  bool op_made_nodes(const Allocation& allocation) const;
  bool dies_in_op(const Allocation& allocation) const;
  std::set<const Allocation*> find_kept_workspaces(const AllocationTable& table,
                                                   std::span<const uint32_t> allocations) const;

  const Trace& trace_;
  const NodeTable& nodes_;
  ObservationWindow observed_;
  bool modules_known_ = false;
  bool stacks_call_modules_ = false;  ///< of a snapshot
  bool reduces_gradients_ = false;    ///< DistributedDataParallel does
  std::set<const Allocation*> workspaces_;
};

}  // namespace oomdiag
