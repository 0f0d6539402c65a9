#include "profiler/replay/allocations/last_walk.h"

#include "profiler/replay/allocations/memory_state.h"

namespace oomdiag {
namespace {

uint64_t find_last_walk(const EventLog& events) {
  uint64_t last = kNoEvent;
  for (auto at = events.begin(); at != events.end(); ++at) {
    if (at->kind == EventKind::graph_begin) last = at.index();
  }
  return last;
}

}  // namespace

// Read as an OOM is whose description is this traversal: of an earlier one nothing counts.
std::vector<LiveBlock> read_last_walk(const Trace& trace) {
  const uint64_t traversal = find_last_walk(trace.events);
  if (traversal == kNoEvent) return {};
  const AllocatorSettings settings = parse_allocator_settings(trace.process.allocator_settings);
  const TracePrescan prescan = prescan_trace(trace, {});
  const Measurements measured = measure(trace, prescan, settings);
  std::vector<ViewRequest> requested;
  for (const MeasuredDevice& device : measured.devices) {
    if (!device.used) continue;
    requested.push_back({.point = {.device = static_cast<uint8_t>(device.history.index),
                                   .event = traversal,
                                   .state_end = traversal,
                                   .description_end = trace.events.size(),
                                   .failed = true}});
  }
  const AllocationViews views = follow_allocations(trace, prescan, measured.nodes, settings, requested);
  std::vector<LiveBlock> saved;
  for (const DeviceViews& card : views.devices) {
    for (LiveBlock& block : describe_blocks(trace, views, card.live_set, measured.nodes)) {
      block.bytes = block.requested_bytes;
      if (!block.saved_by.empty()) saved.push_back(std::move(block));
    }
  }
  return saved;
}

}  // namespace oomdiag
