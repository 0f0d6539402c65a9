#pragma once

#include <cstdint>
#include <span>

#include "profiler/replay/allocations/measure.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/steps/phases.h"
#include "profiler/replay/steps/timeline.h"

namespace oomdiag {

/// Measures one device in the first pass over a trace: give it the device's events in order.
class DeviceMeter {
 public:
  DeviceMeter(const Trace& trace, const AllocatorSettings& settings, uint8_t device);

  /// An alloc, free or segment event.
  void apply(const Event& event, uint64_t index) {
    result_.used = true;
    blocks_.apply(event, static_cast<uint32_t>(index));
    history().peak.reserved_bytes = std::max(history().peak.reserved_bytes, blocks_.reserved_bytes());
    timeline_.add({index, 0, blocks_.allocated_bytes(), blocks_.reserved_bytes()});
  }
  /// After apply: what an alloc event means for the peaks and the joins.
  void note_alloc(const Event& event, uint64_t index, const Phases& phases, const NodeTable& nodes);
  /// An out_of_memory event; `refusal` says how it ended.
  void note_refusal(const Event& event, const Phases& phases, const NodeTable& nodes, OutOfMemory refusal);
  /// A memory_stats event: what PyTorch counted itself.
  void check_stats(const Event& event);
  /// A device_memory event.
  void read_device_memory(const Event& event, uint64_t index);
  /// A driver_…, card_step or card_process event, or one of a new segment.
  void note_outside(uint64_t index) { result_.outside_events.push_back(index); }
  /// What the card held when recording began, or went on; `index`: its last event.
  void begin_with(std::span<const Event> layout, uint64_t index, const Phases& phases);
  /// A run of segment_state and block_state events, perhaps of several devices.
  void check_layout(std::span<const Event> layout);
  /// A note that the program set.
  void note_mark(const Event& event, uint32_t step);
  /// graph_begin and packed_tensor events.
  void note_walk() { packed_in_walk_ = 0; }
  void note_packed(const Event& event);

  /// Says that a step has ended; 0: what came before the first one.
  void end_step(uint32_t step) {
    if (step != 0) step_ends_.add({step, blocks_.allocated_bytes()});
  }

  Measured finish();

 private:
  DeviceHistory& history() { return result_.history; }
  void note_error(int64_t difference);
  void take_totals(const Event& event);
  void attribute(const Event& event, const NodeTable& nodes);

  const Trace& trace_;
  uint8_t device_;
  bool whole_;  ///< the trace begins with the program
  Blocks blocks_;
  Timeline timeline_;
  PhasePeaks phase_peaks_;
  StepEnds step_ends_;
  int64_t packed_in_walk_ = 0;
  int64_t peak_since_mark_ = 0;
  Measured result_;
};

}  // namespace oomdiag
