#include "profiler/replay/evidence/backward_runs.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

uint64_t key_of(uint16_t thread, uint64_t sequence) { return uint64_t{thread} << 48 | (sequence & 0xffff'ffff'ffff); }

// Of the last of these nodes to run. Backward goes against forward's order: that is the one that was made first.
uint64_t key_of(const std::vector<SavingNode>& nodes) {
  const SavingNode& last = *std::ranges::min_element(nodes, {}, &SavingNode::node_sequence);
  return key_of(last.node_thread, last.node_sequence);
}

bool is_activation(const Allocation& allocation) {
  return allocation.is_known() && !allocation.is_initial() && allocation.name == 0;
}

}  // namespace

BackwardRuns::BackwardRuns(const Trace& trace, const AllocationTable& table, const LiveSet& live_set,
                           uint64_t failure) {
  if (!live_set.walked_at_failure) return;
  uint64_t begin = failure;
  for (size_t b = 0; b < live_set.allocations.size(); ++b) {
    const Allocation& allocation = table[live_set.allocations[b]];
    const auto& nodes = live_set.saving_nodes[b];
    if (nodes.empty() || !is_activation(allocation)) continue;
    begin = std::min(begin, allocation.born);
    last_event_.emplace(key_of(nodes), 0);
  }
  if (last_event_.empty()) return;
  for (auto at = trace.events.from(begin); at != trace.events.end() && at.index() < failure; ++at) {
    if (at->kind != EventKind::alloc || !in_node(*at)) continue;
    if (const auto node = last_event_.find(key_of(at->node_thread, at->node_sequence)); node != last_event_.end())
      node->second = at.index();
  }
  const Event request = trace.events[failure];
  if (in_node(request)) last_event_.erase(key_of(request.node_thread, request.node_sequence));
}

bool BackwardRuns::has_run(const Allocation& allocation, const std::vector<SavingNode>& nodes) const {
  if (nodes.empty() || !is_activation(allocation)) return false;
  const auto node = last_event_.find(key_of(nodes));
  return node != last_event_.end() && node->second > allocation.born;
}

}  // namespace oomdiag
