#pragma once

#include <cstdint>
#include <vector>

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/growth_samples.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/allocations/open_ops.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/evidence/graphs.h"
#include "profiler/replay/steps/phases.h"

namespace oomdiag {

/// What all devices share on the way through a trace.
struct PassState {
  PassState(const Trace& events, const TracePrescan& prescan) : trace(events), phases(events, prescan) {}

  const Trace& trace;
  Phases phases;
  AllocationTable table{};
  OpenOps ops{};
  Graphs graphs{};
  uint64_t optimizer_open_since = kNoEvent;  ///< scope_begin of an optimizer step that has not ended
};

/// Follows the blocks of one device: give it the device's events in order.
class DeviceFollower {
 public:
  DeviceFollower(PassState& pass, const AllocatorSettings& settings, const ViewRequest& requested);

  void allocate(const Event& event, uint64_t index);
  void request_free(const Event& event, uint64_t index);
  void complete_free(const Event& event, uint64_t index);
  /// A segment event.
  void apply(const Event& event, uint64_t index) { blocks_.apply(event, static_cast<uint32_t>(index)); }
  void read_layout(const Event& event, uint64_t index);
  /// An event that names a block.
  void note(const Event& event, uint64_t index);
  /// … that is older than the trace.
  void note_kept(const Event& event);

  /// Says that another step has begun.
  void turn_step(uint32_t ended, uint64_t index);
  /// The next event at which `stop` has something to do: the failing request, or the state to describe.
  uint64_t next_stop() const;
  void stop(uint64_t index);

  /// Whether a traversal that begins here is the first that describes this device's OOM.
  bool begins_own_traversal(uint64_t index) const;
  void note_traversal(uint64_t index);
  void note_backward() { saving_nodes_.note_backward(); }
  /// No graph of the newest traversal lives any more.
  void end_traversal() { saving_nodes_.conclude(pass_.table, lives_.live_set); }

  /// After the trace. `nodes` of the whole trace.
  DeviceViews finish(const NodeTable& nodes);

 private:
  /// Snapshots have no calls of operators. What follows each other from one stack of calls is taken for one.
  struct Call {
    uint32_t context = 0, serial = 0;
  };

  uint8_t device() const { return request_.point.device; }
  bool has_own_traversal() const;
  ObservationWindow observed_until(uint64_t index) const;
  void end_steps(uint64_t index);
  void take_live_set(uint64_t index);
  void adopt(const std::vector<Event>& layout, uint64_t index);
  uint32_t ensure_allocation(const Block& block, uint64_t index);
  void describe_initial(Allocation& allocation) const;
  void show(uint32_t allocation, uint64_t index);
  bool is_described(uint64_t index) const;
  uint32_t call_of(const Event& event);
  void describe_free(Allocation& allocation, const Event& event);
  void finish_fates();

  PassState& pass_;
  const ViewRequest& request_;
  Blocks blocks_;
  PlaceCounter counter_;
  GrowthSamples places_;
  LiveSetSavingNodes saving_nodes_;
  Call call_{};                          ///< of snapshots
  uint64_t optimizer_allocated_ = 0;     ///< index of the newest allocation of an optimizer's step; of snapshots
  std::vector<bool> freed_by_backward_;  ///< by context: a block made there was; of snapshots
  bool has_failed_ = false, is_taken_ = false;
  bool own_traversal_ = false;  ///< the OOM's description holds a traversal
  bool own_traversed_ = false;  ///< … and it has begun
  DeviceViews lives_;
};

}  // namespace oomdiag
