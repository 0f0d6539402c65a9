#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/device_stats.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocations/growth_samples.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/allocations/open_ops.h"
#include "profiler/replay/allocator/address_map.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/evidence/allocation_reader.h"
#include "profiler/replay/evidence/graphs.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/steps/phases.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What all devices share on the way through a trace.
struct PassState {
  PassState(const Trace& events, const TracePrescan& found) : trace(events), prescan(found), phases(events, found) {}

  const Trace& trace;
  const TracePrescan& prescan;
  Phases phases;
  NodeTable nodes{};
  AllocationTable table{};
  OpenOps ops{};
  Graphs graphs{};
  uint64_t optimizer_open_since = kNoEvent;  ///< scope_begin of an optimizer step that has not ended
  uint64_t layout_end = 0;                   ///< of the layouts that were checked against the blocks
};

/// Follows the blocks of one device: give it the device's events in order.
class DeviceFollower {
 public:
  /// `at`: the point whose state is kept; without one that of the peak.
  DeviceFollower(PassState& pass, uint8_t device, const std::optional<StatePoint>& at);
  DeviceFollower(const DeviceFollower&) = delete;

  void allocate(const Event& event, uint64_t index);
  /// A free_requested or free_completed event.
  void free(const Event& event, uint64_t index);
  /// A segment event.
  void apply(const Event& event, uint64_t index);
  /// A segment_state or block_state event.
  void read_layout(const Event& event, uint64_t index);
  /// An event that names a block.
  void note(const Event& event, uint64_t index);
  /// … that is older than the trace.
  void note_kept(const Event& event);
  DeviceStats& stats() { return stats_; }

  /// Says that another step has begun.
  void turn_step(uint32_t ended, uint64_t index);
  /// The next event at which `stop` has something to do: the failing request, or the state to describe.
  uint64_t next_stop() const;
  void stop(uint64_t index);

  /// Whether a traversal that begins here is the first that describes this device's OOM.
  bool begins_own_traversal(uint64_t index) const;
  void note_traversal(uint64_t index);
  void note_backward() { saving_nodes_.note_backward(); }

  /// After the trace.
  FollowedDevice finish();

 private:
  /// Snapshots have no calls of operators. What follows each other from one stack of calls is taken for one.
  struct Call {
    uint32_t context = 0, serial = 0;
  };

  bool has_own_traversal() const;
  ObservationWindow observed_until(uint64_t index) const;
  void end_step(uint64_t index);
  bool is_like_peak() const;
  void choose_steps(uint64_t index);
  void note_peak(uint64_t index);
  void mark(uint64_t index);
  void read_live_set();
  void adopt(const std::vector<Event>& layout, uint64_t index);
  uint32_t add();
  uint32_t find(const Block* block, uint64_t address) const;
  void request_free(uint32_t id, const Event& event, uint64_t index);
  void drop_ended(uint64_t index);
  void end(uint32_t id);
  void detach(uint32_t id);
  void describe_initial(Allocation& allocation) const;
  bool is_described(uint64_t index) const;
  uint32_t call_of(const Event& event);
  void describe_free(Allocation& allocation, const Event& event);
  void finish_fates();

  PassState& pass_;
  uint8_t device_;
  FollowedDevice result_{};
  Blocks blocks_;
  DeviceStats stats_;
  AddressMap<uint32_t> elsewhere_;  ///< allocations of addresses at which no block is in use, yet named by events
  size_t living_ = 0;               ///< allocations
  PlaceCounter counter_;
  GrowthSamples places_;
  HeldAllocations marked_;      ///< those of the live set that are gone
  uint32_t marked_before_ = 0;  ///< the live set has only allocations with smaller numbers
  LiveSetSavingNodes saving_nodes_;
  StepCollector step_;                   ///< that runs
  StepCollector kept_;                   ///< that of the peak; before an OOM the one before step_
  StepCollector typical_;                ///< the first after step 1 that is as high as the peak, which step 1 has
  Call call_{};                          ///< of snapshots
  uint64_t optimizer_allocated_ = 0;     ///< index of the newest allocation of an optimizer's step; of snapshots
  std::vector<bool> freed_by_backward_;  ///< by context: a block made there was; of snapshots
  bool has_failed_ = false, is_marked_ = false;
  bool is_typical_ = false;     ///< step_ may become typical_
  bool own_traversal_ = false;  ///< the OOM's description holds a traversal
  bool own_traversed_ = false;  ///< … and it has begun
};

}  // namespace oomdiag
