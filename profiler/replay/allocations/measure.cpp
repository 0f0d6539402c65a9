#include "profiler/replay/allocations/measure.h"

#include <span>

#include "profiler/replay/allocations/device_stats.h"
#include "profiler/replay/allocator/initial_layout.h"
#include "profiler/replay/steps/phases.h"

namespace oomdiag {
namespace {

/// The end of the run of layout events that begins at `begin`. Other threads' events may lie between.
uint64_t end_of_layout(const EventLog& events, uint64_t begin) {
  uint64_t end = begin + 1;
  const uint16_t thread = events[begin].thread;
  for (auto at = events.from(begin); at != events.end(); ++at) {
    if (at->thread != thread) continue;
    if (at->kind != EventKind::segment_state && at->kind != EventKind::block_state) break;
    end = at.index() + 1;
  }
  return end;
}

/// The first pass over all devices.
class StatsPass {
 public:
  StatsPass(const Trace& trace, const TracePrescan& prescan, const AllocatorSettings& settings)
      : trace_(trace), prescan_(prescan), phases_(trace, prescan) {
    for (uint8_t d = 0; d < kMaxDevices; ++d) devices_.emplace_back(trace, settings, d);
  }

  Measurements run() {
    for (auto at = trace_.events.begin(); at != trace_.events.end(); ++at) take(*at, at.index());
    result_.steps = phases_.step();
    for (DeviceStats& device : devices_) result_.devices.push_back(device.finish());
    return std::move(result_);
  }

 private:
  void take(const Event& event, uint64_t index) {
    const uint32_t step = phases_.step();
    phases_.advance(event, index);
    if (phases_.step() != step) {
      for (DeviceStats& device : devices_) device.end_step(step);
    }
    if (event.device >= kMaxDevices) return;
    DeviceStats& device = devices_[event.device];
    switch (event.kind) {
      case EventKind::alloc:
        device.apply(event, index);
        device.note_alloc(event, index, phases_, result_.nodes);
        break;
      case EventKind::segment_alloc:
      case EventKind::segment_map:
        device.note_outside(index);
        device.apply(event, index);
        break;
      case EventKind::free_requested:
      case EventKind::free_completed:
      case EventKind::segment_free:
      case EventKind::segment_unmap:
        device.apply(event, index);
        break;
      case EventKind::out_of_memory:
        note_refusal(device, event, index);
        break;
      case EventKind::memory_stats:
        device.check_stats(event);
        break;
      case EventKind::device_memory:
        device.read_device_memory(event, index);
        break;
      case EventKind::segment_state:
      case EventKind::block_state:
        check_layout(device, index);
        break;
      case EventKind::nodes_created:
        result_.nodes.add(event);
        break;
      case EventKind::graph_begin:
        device.note_traversal();
        break;
      case EventKind::packed_tensor:
        device.note_packed(event);
        break;
      case EventKind::driver_alloc:
      case EventKind::driver_map:
      case EventKind::driver_free:
      case EventKind::card_step:
      case EventKind::card_process:
        device.note_outside(index);
        break;
      case EventKind::note:
        if (trace_.name(trace_.context(event.context).op) == kMark) {
          for (DeviceStats& one : devices_) one.note_mark(event, phases_.step());
        }
        break;
      case EventKind::none:
      case EventKind::wanted:
      case EventKind::grouped:
      case EventKind::referrer:
      case EventKind::op_failed:
      case EventKind::scope_begin:
      case EventKind::scope_end:
      case EventKind::saved_tensor:
      case EventKind::parameter:
      case EventKind::buffer:
      case EventKind::gradient:
      case EventKind::stack:
        break;
    }
  }

  void note_refusal(DeviceStats& device, const Event& event, uint64_t index) {
    while (next_refusal_ < prescan_.refusals.size() && prescan_.refusals[next_refusal_].event < index) ++next_refusal_;
    if (next_refusal_ == prescan_.refusals.size()) return;
    device.note_refusal(event, phases_, result_.nodes, prescan_.refusals[next_refusal_]);
  }

  void check_layout(DeviceStats& device, uint64_t index) {
    if ((trace_.events[index].flags & kBeforeRecording) != 0) {
      if (const auto layout = find_initial_layout(trace_.events, index); !layout.empty()) {
        device.begin_with(layout, index + layout.size() - 1, phases_);
      }
      return;
    }
    if (index < layout_end_) return;
    layout_end_ = end_of_layout(trace_.events, index);
    device.check_layout(trace_.events.slice(index, layout_end_, kMaxLayoutEvents));
  }

  const Trace& trace_;
  const TracePrescan& prescan_;
  Phases phases_;
  std::vector<DeviceStats> devices_;
  Measurements result_;
  size_t next_refusal_ = 0;
  uint64_t layout_end_ = 0;
};

}  // namespace

Measurements measure(const Trace& trace, const TracePrescan& prescan, const AllocatorSettings& settings) {
  return StatsPass(trace, prescan, settings).run();
}

}  // namespace oomdiag
