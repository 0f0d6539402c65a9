#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Which forward op made which autograd node: ranges of node numbers, per thread. A node is known by (thread of its
/// forward op, sequence number).
class NodeTable {
 public:
  /// Takes a nodes_created event. Where numbers recur the newest event wins.
  void add(const Event& nodes_created);
  /// The context of the forward op that made this node; nullptr if no event named it.
  const uint32_t* find(uint16_t thread, uint64_t node_sequence) const;

 private:
  struct Range {
    uint64_t first = 0;
    uint32_t count = 0;
    uint32_t context = 0;
  };
  std::map<uint16_t, std::vector<Range>> threads_;  ///< ranges ascend and do not overlap
};

/// Where `event` happened; inside a backward node the forward op, module and line that made the node. Forward ops that
/// checkpointing runs again there speak for themselves.
Where locate(const Trace& trace, const NodeTable& nodes, const Event& event);

/// Whether `event` belongs to an autograd node that runs.
inline bool in_node(const Event& event) { return event.node_sequence != kNoNode; }

}  // namespace oomdiag
