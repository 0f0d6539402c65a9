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

// Read as an OOM is whose description is this walk: of an earlier one nothing counts.
std::vector<LiveBlock> read_last_walk(const Trace& trace) {
  const uint64_t walk = find_last_walk(trace.events);
  if (walk == kNoEvent) return {};
  const AllocatorSettings settings = parse_allocator_settings(trace.process.allocator_settings);
  const Outline outline = read_outline(trace, {});
  const Measurements measured = measure(trace, outline, settings);
  std::vector<Wanted> wanted;
  for (const Measured& device : measured.devices) {
    if (!device.used) continue;
    wanted.push_back({.instant = {.device = static_cast<uint8_t>(device.history.index),
                                  .event = walk,
                                  .state_end = walk,
                                  .description_end = trace.events.size(),
                                  .failed = true}});
  }
  const Views views = follow_lives(trace, outline, measured.nodes, settings, wanted);
  std::vector<LiveBlock> saved;
  for (const CardViews& card : views.cards) {
    for (LiveBlock& block : describe_blocks(trace, views, card.cut, measured.nodes)) {
      block.bytes = block.requested_bytes;
      if (!block.saved_by.empty()) saved.push_back(std::move(block));
    }
  }
  return saved;
}

}  // namespace oomdiag
