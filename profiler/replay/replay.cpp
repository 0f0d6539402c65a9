#include "profiler/replay/replay.h"

#include <algorithm>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocations/memory_state.h"
#include "profiler/replay/allocations/step_allocations.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/non_pytorch/non_pytorch.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

// What the failing node asked for: the gradient of one of its inputs, if one has just the size of the failed request.
void find_requested_tensor(const Trace& trace, const NodeTable& nodes, const AllocatorSettings& settings,
                           OutOfMemory& oom) {
  for (auto at = trace.events.from(oom.event); at != trace.events.end() && at.index() <= oom.end; ++at) {
    const Event& event = *at;
    if (event.kind != EventKind::requested_gradient || !oom.requested_shape.empty()) continue;
    if (round_size(event.bytes, settings) != oom.requested_bytes) continue;
    oom.requested_shape = trace.name(event.detail);
    oom.requested_gradient_of = event.node_sequence == kAccumulateGrad ? Where{} : locate(trace, nodes, event);
  }
}

// The OOM's own stack, in backward that of the forward op's line; and the parameter group of the optimizer.
void find_surroundings(const Trace& trace, const Stacks& stacks, OutOfMemory& oom) {
  const uint16_t thread = trace.events[oom.event].thread;
  for (auto at = trace.events.from(oom.event); at != trace.events.end() && at.index() <= oom.end; ++at) {
    const Event& event = *at;
    if (event.address != 0 || event.thread != thread) continue;
    if (event.kind == EventKind::grouped) oom.group = trace.name(event.detail);
    if (event.kind != EventKind::stack) continue;
    const bool native = (event.flags & kNativeStack) != 0;
    (native ? oom.native_stack : oom.stack) = trace.name(event.detail);
    oom.modules_evaluate |= (event.flags & kModulesEvaluate) != 0;
    oom.asks_for_checkpoints |= (event.flags & kAsksForCheckpoints) != 0;
    oom.copies_deeply |= (event.flags & kCopiesDeeply) != 0;
    oom.names_backward |= (event.flags & kNamesBackward) != 0;
  }
  if (oom.where.source.empty()) return;  // what has no line has calls of C++ at most
  if (const auto found = stacks.find(oom.where.source); found != stacks.end()) oom.first_stack = found->second;
  if (oom.stack.empty()) oom.stack = oom.first_stack;
}

// FSDP2 has ops of its own; FSDP1 and ZeRO-3 scatter what they reduced.
bool shards_parameters(const Trace& trace) {
  return std::any_of(trace.names.begin(), trace.names.end(), [](const std::string& name) {
    return name.starts_with("fsdp::") || name == "c10d::_reduce_scatter_base_";
  });
}

}  // namespace

History replay(const Trace& trace, std::optional<bool> survived) {
  TracePrescan prescan = prescan_trace(trace, survived);
  FollowedTrace followed = follow_allocations(trace, prescan);
  History history{.settings = parse_allocator_settings(trace.process.allocator_settings),
                  .devices = {},
                  .steps = followed.steps,
                  .notes = std::move(prescan.notes),
                  .reads = std::move(prescan.reads)};
  const bool sharded = shards_parameters(trace);
  for (FollowedDevice& device : followed.devices) {
    DeviceHistory& replayed = device.history;
    for (OutOfMemory& oom : replayed.ooms) {
      find_requested_tensor(trace, followed.nodes, history.settings, oom);
      find_surroundings(trace, prescan.stacks, oom);
      if (oom.outcome == Outcome::fatal) replayed.failure = oom;
    }
    for (const ReferrerEvents& one : device.referrers) {
      auto& list = one.on_host && one.nodes == 0 ? replayed.host_tensors : replayed.referrers;
      list.push_back({.variable = trace.name(one.variable),
                      .made = locate(trace, followed.nodes, one.maker),
                      .nodes = one.nodes,
                      .bytes = one.bytes,
                      .storage_bytes = one.on_host ? 0 : std::max(one.bytes, one.maker.bytes),
                      .wants_gradient = one.wants_gradient,
                      .of_newest_steps = one.of_newest_steps,
                      .context = one.maker.context,
                      .born = one.born});
    }
    for (const PaddingEvent& one : device.padded) {
      replayed.padded.push_back({.variable = trace.name(one.variable),
                                 .shape = trace.name(one.shape),
                                 .longest = one.longest,
                                 .per_mille = one.per_mille});
    }
    const OutOfMemory* failure = replayed.failure ? &*replayed.failure : nullptr;
    replayed.looked_for_referrers =
        !device.search_was_cut && (!replayed.referrers.empty() || (failure != nullptr && trace.process.python_ended));
    replayed.step_allocations = read_step(trace, followed, device, device.step, failure);
    if (has_complete_step(trace, prescan, device)) {
      replayed.complete = read_step(trace, followed, device, device.complete, nullptr);
    }
    replayed.state = read_moment(trace, followed, device);
    NonPytorchState non_pytorch = read_non_pytorch(trace, device.non_pytorch_events, trace.events.size());
    replayed.initialization_steps = std::move(non_pytorch.steps);
    replayed.failed_driver_requests = std::move(non_pytorch.failed_requests);
    replayed.non_pytorch_measured = !device.non_pytorch.empty() || replayed.failure.has_value();
    replayed.sharded = sharded;
    history.devices.push_back(std::move(replayed));
  }
  return history;
}

}  // namespace oomdiag
