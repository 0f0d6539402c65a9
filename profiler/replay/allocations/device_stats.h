#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "profiler/event.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/phases.h"
#include "profiler/replay/steps/timeline.h"
#include "profiler/trace/evenly_spaced.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Measures one device: give it the device's events in order, each after `blocks` took it. What it measures is in `result`.
class DeviceStats {
 public:
  DeviceStats(const Trace& trace, uint8_t device, Blocks& blocks, FollowedDevice& result);

  /// An alloc, free or segment event.
  void note_event(uint64_t index) {
    result_.used = true;
    history().peak.reserved_bytes = std::max(history().peak.reserved_bytes, blocks_.reserved_bytes());
    timeline_.add({index, 0, blocks_.allocated_bytes(), blocks_.reserved_bytes()});
  }
  /// Then what an alloc event means for the peaks and the joins. True: it made the peak.
  bool note_alloc(const Event& event, uint64_t index, uint32_t step, Phase phase, const NodeTable& nodes);
  /// An out_of_memory event; `oom` says how it ended.
  void note_oom(const Event& event, const Phases& phases, const NodeTable& nodes, OutOfMemory oom);
  /// A memory_stats event: what PyTorch counted itself.
  void check_stats(const Event& event);
  /// A device_memory event.
  void read_device_memory(const Event& event, uint64_t index);
  /// A driver_…, gpu_step or gpu_process event, or one of a new segment.
  void note_non_pytorch(uint64_t index) { result_.non_pytorch_events.push_back(index); }
  /// The blocks are those that the GPU held when recording began, or went on, as a layout had them whose last event is `index`.
  /// True: they made the peak.
  bool note_initial_layout(uint64_t index, const Phases& phases);
  /// A run of segment_state and block_state events, perhaps of several devices. False: the blocks are not as it says.
  bool check_layout(std::span<const Event> layout);
  /// A note that the program set.
  void note_mark(const Event& event, uint32_t step);
  /// graph_begin and packed_tensor events.
  void note_traversal() { packed_in_traversal_ = 0; }
  void note_packed(const Event& event);

  /// Says that a step has ended; 0: what came before the first one.
  void end_step(uint32_t step) {
    if (step != 0) step_ends_.add({step, blocks_.allocated_bytes()});
  }

  void finish();

 private:
  DeviceHistory& history() { return result_.history; }
  bool raise_peak(uint64_t index, uint32_t step, Phase phase);
  void note_error(int64_t difference);
  void take_totals(const Event& event);
  void attribute(const Event& event, const NodeTable& nodes);

  const Trace& trace_;
  uint8_t device_;
  bool whole_;  ///< the trace begins with the program
  Blocks& blocks_;
  Timeline timeline_;
  PhasePeaks phase_peaks_;
  StepEnds step_ends_;
  int64_t packed_in_traversal_ = 0;
  int64_t peak_since_mark_ = 0;
  static constexpr size_t kMaxReadings = 64;  ///< long runs have one at each step
  EvenlySpaced<NonPytorchReading> readings_{kMaxReadings};
  NonPytorchReading newest_reading_{};
  FollowedDevice& result_;
};

}  // namespace oomdiag
