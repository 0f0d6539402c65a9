#include "profiler/replay/replay.h"

#include <algorithm>

#include "profiler/replay/allocations/measure.h"
#include "profiler/replay/allocations/memory_state.h"
#include "profiler/replay/allocations/step_allocations.h"
#include "profiler/replay/non_pytorch/non_pytorch.h"
#include "profiler/replay/steps/prescan.h"

namespace oomdiag {
namespace {

// What the failing node asked for: the gradient of one of its inputs, if one has just the size that was refused.
void find_requested_tensor(const Trace& trace, const NodeTable& nodes, const AllocatorSettings& settings,
                           OutOfMemory& refusal) {
  for (auto at = trace.events.from(refusal.event); at != trace.events.end() && at.index() <= refusal.end; ++at) {
    const Event& event = *at;
    if (event.kind != EventKind::wanted || !refusal.wanted_shape.empty()) continue;
    if (round_size(event.bytes, settings) != refusal.requested_bytes) continue;
    refusal.wanted_shape = trace.name(event.detail);
    refusal.wanted_by = event.node_sequence == kAccumulateGrad ? Where{} : locate(trace, nodes, event);
  }
}

// The refusal's own stack, in backward that of the forward op's line; and the parameter group of the optimizer.
void find_surroundings(const Trace& trace, const Stacks& stacks, OutOfMemory& refusal) {
  const uint16_t thread = trace.events[refusal.event].thread;
  for (auto at = trace.events.from(refusal.event); at != trace.events.end() && at.index() <= refusal.end; ++at) {
    const Event& event = *at;
    if (event.address != 0 || event.thread != thread) continue;
    if (event.kind == EventKind::grouped) refusal.group = trace.name(event.detail);
    if (event.kind != EventKind::stack) continue;
    const bool native = (event.flags & kNativeStack) != 0;
    (native ? refusal.native_stack : refusal.stack) = trace.name(event.detail);
  }
  if (!refusal.stack.empty() || refusal.where.source.empty()) return;
  if (const auto found = stacks.find(refusal.where.source); found != stacks.end()) refusal.stack = found->second;
}

bool is_first_in_op(const Trace& trace, const OutOfMemory& refusal) {
  const Event failed = trace.events[refusal.event];
  for (uint64_t i = refusal.event; i-- > 0;) {
    const Event event = trace.events[i];
    if (event.thread != failed.thread) continue;
    if (event.call_id != failed.call_id || event.call_id == 0) return true;
    if (event.kind == EventKind::alloc) return false;
  }
  return true;
}

// FSDP2 has ops of its own; FSDP1 and ZeRO-3 scatter what they reduced.
bool shards_parameters(const Trace& trace) {
  return std::any_of(trace.names.begin(), trace.names.end(), [](const std::string& name) {
    return name.starts_with("fsdp::") || name == "c10d::_reduce_scatter_base_";
  });
}

}  // namespace

History replay(const Trace& trace, std::optional<bool> survived) {
  const AllocatorSettings settings = parse_allocator_settings(trace.process.allocator_settings);
  TracePrescan prescan = prescan_trace(trace, survived);
  Measurements measured = measure(trace, prescan, settings);

  History history{.settings = settings,
                  .devices = {},
                  .steps = measured.steps,
                  .notes = std::move(prescan.notes),
                  .reads = std::move(prescan.reads)};
  std::erase_if(measured.devices, [](const MeasuredDevice& device) { return !device.used; });
  std::vector<ViewRequest> requested;
  for (MeasuredDevice& device : measured.devices) {
    for (OutOfMemory& refusal : device.history.refusals) {
      find_requested_tensor(trace, measured.nodes, settings, refusal);
      find_surroundings(trace, prescan.stacks, refusal);
      refusal.first_in_op = is_first_in_op(trace, refusal);
      if (refusal.outcome == Outcome::fatal) device.history.failure = refusal;
    }
    requested.push_back({find_state_point(trace, device.history),
                         {typical_step(device.history), complete_step(trace, prescan, device.history)}});
  }
  AllocationViews views = follow_allocations(trace, prescan, measured.nodes, settings, requested);
  const bool sharded = shards_parameters(trace);
  for (size_t d = 0; d < measured.devices.size(); ++d) {
    MeasuredDevice& device = measured.devices[d];
    DeviceViews& card = views.devices[d];
    const OutOfMemory* failure = device.history.failure ? &*device.history.failure : nullptr;
    device.history.curves = std::move(card.curves);
    for (const auto& [maker, variable, count] : card.referrers) {
      device.history.referrers.push_back({trace.name(variable), locate(trace, measured.nodes, maker), count});
    }
    // One without a variable tells that they were looked for, and that no variable leads to any tensor.
    if (device.history.referrers.empty() && failure != nullptr && trace.process.python_ended) {
      device.history.referrers.emplace_back();
    }
    device.history.step_allocations = read_step(trace, measured.nodes, views, card.steps[0], failure);
    device.history.complete = read_step(trace, measured.nodes, views, card.steps[1], nullptr);
    device.history.state = read_moment(trace, device, measured.nodes, views, card.live_set);
    NonPytorchState outside = read_non_pytorch(trace, device.outside_events, trace.events.size());
    device.history.initialization_steps = std::move(outside.steps);
    device.history.failed_driver_requests = std::move(outside.refusals);
    device.history.outside_measured = !device.outside.empty() || device.history.failure.has_value();
    device.history.sharded = sharded;
    history.devices.push_back(std::move(device.history));
  }
  return history;
}

}  // namespace oomdiag
