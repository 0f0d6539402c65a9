#include "profiler/replay/allocations/allocation_pass.h"

#include <algorithm>

#include "profiler/replay/allocations/device_follower.h"

// Each allocation has a record (allocation_table.h). Events add to it what they say of the block, also after the moment that
// is described: a module may name its parameters later, and the graph is traversed when backward begins. When the block is
// freed its record is recycled, unless a view (live_set.h) references it; what of each place lives is a sum per place.

namespace oomdiag {
namespace {

class AllocationPass {
 public:
  AllocationPass(const Trace& trace, const TracePrescan& prescan, const AllocatorSettings& settings,
                 std::span<const ViewRequest> requested)
      : pass_(trace, prescan), by_device_(kMaxDevices, nullptr) {
    devices_.reserve(requested.size());
    for (const ViewRequest& one : requested) {
      by_device_[one.point.device] = &devices_.emplace_back(pass_, settings, one);
    }
    for (const Event& event : trace.kept) {
      if (DeviceFollower* device = device_of(event)) device->note_kept(event);
    }
    plan_next_stop();
  }

  AllocationViews read(const NodeTable& nodes) {
    const EventLog& events = pass_.trace.events;
    for (auto at = events.begin(); at != events.end(); ++at) take(*at, at.index());
    pass_.graphs.end_traversal();
    AllocationViews views;
    for (DeviceFollower& device : devices_) views.devices.push_back(device.finish(nodes));
    views.table = std::move(pass_.table);
    return views;
  }

 private:
  DeviceFollower* device_of(const Event& event) const {
    return event.device < kMaxDevices ? by_device_[event.device] : nullptr;
  }

  void take(const Event& event, uint64_t index) {
    const uint32_t step = pass_.phases.step();
    pass_.phases.advance(event, index);
    if (pass_.phases.step() != step) [[unlikely]] {
      for (DeviceFollower& device : devices_) device.turn_step(step, index);
    }
    if (index >= next_stop_) [[unlikely]]
      stop(index);
    DeviceFollower* device = device_of(event);
    switch (event.kind) {
      case EventKind::alloc:
        if (in_node(event)) note_backward();
        if (device != nullptr) device->allocate(event, index);
        break;
      case EventKind::free_requested:
        if (device != nullptr) device->request_free(event, index);
        break;
      case EventKind::free_completed:
        if (device != nullptr) device->complete_free(event, index);
        break;
      case EventKind::segment_alloc:
      case EventKind::segment_free:
      case EventKind::segment_map:
      case EventKind::segment_unmap:
        if (device != nullptr) device->apply(event, index);
        break;
      case EventKind::segment_state:
        if (device != nullptr) device->read_layout(event, index);
        break;
      case EventKind::saved_tensor:
      case EventKind::parameter:
      case EventKind::buffer:
      case EventKind::gradient:
      case EventKind::grouped:
      case EventKind::referrer:
        if (device != nullptr) device->note(event, index);
        break;
      case EventKind::nodes_created:
        pass_.ops.note_nodes(event, pass_.table);
        if (!in_backward(pass_.trace, event)) end_traversal();
        break;
      case EventKind::graph_begin:
        begin_traversal(index);
        break;
      case EventKind::scope_begin:
      case EventKind::scope_end:
        note_scope(event, index);
        break;
      case EventKind::none:
      case EventKind::out_of_memory:
      case EventKind::device_memory:
      case EventKind::memory_stats:
      case EventKind::block_state:
      case EventKind::wanted:
      case EventKind::op_failed:
      case EventKind::packed_tensor:
      case EventKind::note:
      case EventKind::stack:
      case EventKind::driver_alloc:
      case EventKind::driver_map:
      case EventKind::driver_free:
      case EventKind::card_step:
      case EventKind::card_process:
        break;
    }
  }

  void plan_next_stop() {
    next_stop_ = kNoEvent;
    for (const DeviceFollower& device : devices_) next_stop_ = std::min(next_stop_, device.next_stop());
  }

  void stop(uint64_t index) {
    for (DeviceFollower& device : devices_) device.stop(index);
    plan_next_stop();
  }

  void begin_traversal(uint64_t index) {
    const auto begins_own = [&](const DeviceFollower& device) { return device.begins_own_traversal(index); };
    pass_.graphs.begin_traversal(index, std::any_of(devices_.begin(), devices_.end(), begins_own));
    for (DeviceFollower& device : devices_) device.note_traversal(index);
  }

  void end_traversal() {
    if (!pass_.graphs.traversed()) return;
    for (DeviceFollower& device : devices_) device.end_traversal();
    pass_.graphs.end_traversal();
  }

  void note_backward() {
    for (DeviceFollower& device : devices_) device.note_backward();
  }

  void note_scope(const Event& event, uint64_t index) {
    if (!is_optimizer_step(pass_.trace.name(event.detail))) return;
    pass_.optimizer_open_since = event.kind == EventKind::scope_begin ? index : kNoEvent;
  }

  PassState pass_;
  std::vector<DeviceFollower> devices_;
  std::vector<DeviceFollower*> by_device_;
  uint64_t next_stop_ = kNoEvent;
};

}  // namespace

AllocationViews follow_allocations(const Trace& trace, const TracePrescan& prescan, const NodeTable& nodes,
                                   const AllocatorSettings& settings, std::span<const ViewRequest> requested) {
  return AllocationPass(trace, prescan, settings, requested).read(nodes);
}

}  // namespace oomdiag
