#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Which of the nodes that keep blocks at a failure had run before it. Backward frees what a node keeps once the node has run: it
/// keeps it with retain_graph=True, and with create_graph=True. Nodes that allocate nothing leave no event, and count as not run.
class BackwardRuns {
 public:
  /// Reads the events from the birth of the oldest activation on up to `failure`, which itself belongs to a node that still runs.
  BackwardRuns(const Trace& trace, const AllocationTable& table, const LiveSet& live_set, uint64_t failure);

  /// Whether the last of these nodes to run has run, although they keep this block.
  bool has_run(const Allocation& allocation, const std::vector<SavingNode>& nodes) const;

 private:
  std::unordered_map<uint64_t, uint64_t> last_event_{};  ///< of each node; 0: none
};

}  // namespace oomdiag
