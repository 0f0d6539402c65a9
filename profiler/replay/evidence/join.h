#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "profiler/event.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Which forward op made which autograd node: ranges of node numbers, per thread. A node is known by (thread of its
/// forward op, sequence number).
class NodeTable {
 public:
  /// Takes a nodes_created event. Where numbers recur the newest event wins.
  void add(const Event& nodes_created);
  struct Made {
    uint32_t context = 0;  ///< of the forward op that made the node
    uint32_t within =
        0;  ///< if a backward node ran that op again: context of the forward op that made that one, else 0

    bool operator==(const Made&) const = default;
  };
  /// How this node was made; nothing if no event named it.
  std::optional<Made> find(uint16_t thread, uint64_t node_sequence) const;

 private:
  /// Millions of them: 16 bytes, and not moved as they become more.
  struct Range {
    uint64_t first = 0;
    uint32_t count = 0;
    uint32_t context = 0;
  };
  struct NodesOfThread {
    std::deque<Range> ranges{};  ///< ascend and do not overlap
    std::deque<std::pair<uint64_t, uint32_t>>
        within{};  ///< Made::within, where that is not 0, behind Range::first; ascend
    Made made_in(const Range& range) const;
  };
  std::map<uint16_t, NodesOfThread> threads_;
};

/// Where `event` happened; inside a backward node the forward op, module and line that made the node. Forward ops that
/// checkpointing runs again there speak for themselves, but for the line where torch's own modules run again: then it is
/// that of the call that was checkpointed.
Where locate(const Trace& trace, const NodeTable& nodes, const Event& event);
/// The same, in numbers of names; `made`: how the event's node was made.
Context find_place(const Trace& trace, const std::optional<NodeTable::Made>& made, const Event& event);

/// Whether `event` belongs to an autograd node that runs.
inline bool in_node(const Event& event) { return event.node_sequence != kNoNode; }

}  // namespace oomdiag
