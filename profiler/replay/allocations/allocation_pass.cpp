#include "profiler/replay/allocations/allocation_pass.h"

#include <algorithm>
#include <memory>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/device_follower.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/format.h"
#include "profiler/trace/trace.h"

// Each allocation has a record (allocation_table.h). Events add to it what they say of the block, also after the moment that
// is described: a module may name its parameters later, and the graph is traversed when backward begins. When the block is
// freed its record is recycled, unless a view (live_set.h) holds it; what of each place lives is a sum per place.
//
// The failure is known from the prescan. The peak is not: each higher point that is reached takes the place of the one before.

namespace oomdiag {
namespace {

class AllocationPass {
 public:
  AllocationPass(const Trace& trace, const TracePrescan& prescan, const std::optional<StatePoint>& at)
      : pass_(trace, prescan), by_device_(kMaxDevices, nullptr) {
    for (uint8_t d = 0; d < kMaxDevices; ++d) {
      if ((prescan.devices >> d & 1) == 0) continue;
      devices_.push_back(std::make_unique<DeviceFollower>(pass_, d, at ? at : find_failure(d)));
      by_device_[d] = devices_.back().get();
    }
    for (const Event& event : trace.kept) {
      if (DeviceFollower* device = device_of(event)) device->note_kept(event);
    }
    plan_next_stop();
  }

  FollowedTrace read() {
    const EventLog& events = pass_.trace.events;
    for (auto at = events.begin(); at != events.end(); ++at) take(*at, at.index());
    pass_.graphs.end_traversal();
    FollowedTrace followed;
    for (const auto& device : devices_) {
      FollowedDevice one = device->finish();
      if (one.used) followed.devices.push_back(std::move(one));
    }
    followed.table = std::move(pass_.table);
    followed.nodes = std::move(pass_.nodes);
    followed.steps = pass_.phases.step();
    return followed;
  }

 private:
  DeviceFollower* device_of(const Event& event) const {
    return event.device < kMaxDevices ? by_device_[event.device] : nullptr;
  }

  // The OOM that ended the program, if it was this device's. The allocator's own layout follows, where the observer could
  // take it: that is the state to describe.
  std::optional<StatePoint> find_failure(uint8_t device) const {
    std::optional<StatePoint> point;
    for (const OutOfMemory& oom : pass_.prescan.ooms) {
      if (oom.outcome != Outcome::fatal || oom.device != device) continue;
      point = {.event = oom.event, .state_end = oom.event, .description_end = oom.end + 1, .failed = true};
    }
    if (!point) return point;
    const EventLog& events = pass_.trace.events;
    for (auto at = events.from(point->event); at != events.end() && at.index() < point->description_end; ++at) {
      if (at->kind != EventKind::segment_state || at->device != device) continue;
      point->state_end = at.index();
      break;
    }
    return point;
  }

  void take(const Event& event, uint64_t index) {
    const uint32_t step = pass_.phases.step();
    pass_.phases.advance(event, index);
    if (pass_.phases.step() != step) [[unlikely]] {
      for (const auto& device : devices_) device->turn_step(step, index);
    }
    if (index >= next_stop_) [[unlikely]]
      stop(index);
    if (DeviceFollower* device = device_of(event)) take(event, index, *device);
  }

  void take(const Event& event, uint64_t index, DeviceFollower& device) {
    switch (event.kind) {
      case EventKind::alloc:
        if (in_node(event)) note_backward();
        device.allocate(event, index);
        break;
      case EventKind::free_requested:
      case EventKind::free_completed:
        device.free(event, index);
        break;
      case EventKind::segment_alloc:
      case EventKind::segment_map:
        device.stats().note_non_pytorch(index);
        device.apply(event, index);
        break;
      case EventKind::segment_free:
      case EventKind::segment_unmap:
        device.apply(event, index);
        break;
      case EventKind::out_of_memory:
        note_oom(device, event, index);
        break;
      case EventKind::memory_stats:
        device.stats().check_stats(event);
        break;
      case EventKind::device_memory:
        device.stats().read_device_memory(event, index);
        break;
      case EventKind::segment_state:
      case EventKind::block_state:
        device.read_layout(event, index);
        break;
      case EventKind::saved_tensor:
      case EventKind::parameter:
      case EventKind::buffer:
      case EventKind::gradient:
      case EventKind::grouped:
      case EventKind::referrer:
        device.note(event, index);
        break;
      case EventKind::nodes_created:
        pass_.nodes.add(event);
        pass_.ops.note_nodes(event, pass_.table);
        if (!in_backward(pass_.trace, event) && pass_.graphs.traversed()) pass_.graphs.end_traversal();
        break;
      case EventKind::graph_begin:
        device.stats().note_traversal();
        begin_traversal(event, index);
        break;
      case EventKind::packed_tensor:
        device.stats().note_packed(event);
        break;
      case EventKind::scope_begin:
      case EventKind::scope_end:
        note_scope(event, index);
        break;
      case EventKind::driver_alloc:
      case EventKind::driver_map:
      case EventKind::driver_free:
      case EventKind::gpu_step:
      case EventKind::gpu_process:
        device.stats().note_non_pytorch(index);
        break;
      case EventKind::note:
        note_mark(event);
        break;
      case EventKind::none:
      case EventKind::requested_gradient:
      case EventKind::op_failed:
      case EventKind::stack:
        break;
    }
  }

  void plan_next_stop() {
    next_stop_ = kNoEvent;
    for (const auto& device : devices_) next_stop_ = std::min(next_stop_, device->next_stop());
  }

  void stop(uint64_t index) {
    for (const auto& device : devices_) device->stop(index);
    plan_next_stop();
  }

  void begin_traversal(const Event& event, uint64_t index) {
    const auto begins_own = [&](const auto& device) { return device->begins_own_traversal(index); };
    const bool is_unchanged = (event.flags & kGraphUnchanged) != 0;
    if (!is_unchanged) pass_.graphs.begin_traversal(index, std::any_of(devices_.begin(), devices_.end(), begins_own));
    for (const auto& device : devices_) device->note_traversal(index);
  }

  void note_backward() {
    for (const auto& device : devices_) device->note_backward();
  }

  void note_scope(const Event& event, uint64_t index) {
    if (!is_optimizer_step(pass_.trace.name(event.detail))) return;
    pass_.optimizer_open_since = event.kind == EventKind::scope_begin ? index : kNoEvent;
  }

  void note_oom(DeviceFollower& device, const Event& event, uint64_t index) {
    const auto& ooms = pass_.prescan.ooms;
    while (next_oom_ < ooms.size() && ooms[next_oom_].event < index) ++next_oom_;
    if (next_oom_ == ooms.size()) return;
    OutOfMemory oom = ooms[next_oom_];
    oom.first_in_op = !pass_.ops.has_allocated(event);
    device.stats().note_oom(event, pass_.phases, pass_.nodes, oom);
  }

  void note_mark(const Event& event) {
    if (pass_.trace.name(pass_.trace.context(event.context).op) != kMark) return;
    for (const auto& device : devices_) device->stats().note_mark(event, pass_.phases.step());
  }

  PassState pass_;
  std::vector<std::unique_ptr<DeviceFollower>> devices_;
  std::vector<DeviceFollower*> by_device_;
  uint64_t next_stop_ = kNoEvent;
  size_t next_oom_ = 0;
};

}  // namespace

FollowedTrace follow_allocations(const Trace& trace, const TracePrescan& prescan, const std::optional<StatePoint>& at) {
  return AllocationPass(trace, prescan, at).read();
}

}  // namespace oomdiag
