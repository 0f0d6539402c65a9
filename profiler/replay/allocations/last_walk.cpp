#include "profiler/replay/allocations/last_walk.h"

#include "profiler/replay/allocations/memory_state.h"

namespace oomdiag {

// Read as an OOM is whose description is this traversal: of an earlier one nothing counts.
std::vector<LiveBlock> read_last_walk(const Trace& trace) {
  const TracePrescan prescan = prescan_trace(trace, {});
  const uint64_t traversal = prescan.last_traversal;
  if (traversal == TracePrescan::kNever) return {};
  const FollowedTrace followed = follow_allocations(
      trace, prescan,
      StatePoint{.event = traversal, .state_end = traversal, .description_end = trace.events.size(), .failed = true});
  std::vector<LiveBlock> saved;
  for (const FollowedDevice& device : followed.devices) {
    for (LiveBlock& block : describe_blocks(trace, followed, device.live_set)) {
      block.bytes = block.requested_bytes;
      if (!block.saved_by.empty()) saved.push_back(std::move(block));
    }
  }
  return saved;
}

}  // namespace oomdiag
