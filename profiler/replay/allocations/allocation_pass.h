#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"

namespace oomdiag {

/// Where in a trace the state to describe lies.
struct StatePoint {
  uint8_t device = 0;
  uint64_t event = 0;            ///< the failing request, or the allocation that made the peak
  uint64_t state_end = 0;        ///< events before this one made the state
  uint64_t description_end = 0;  ///< one past the last event that describes an OOM; = state_end at a peak
  bool failed = false;           ///< `event` is an OOM
  Phase phase = Phase::setup;
};

/// What is to be looked at of one device.
struct ViewRequest {
  StatePoint point{};
  std::vector<uint32_t> steps{};  ///< that are to be told block by block; 0 is none
};

/// The events of a tensor and of what refers to it in the end.
struct ReferrerEvents {
  Event maker{};
  uint64_t variable = 0;  ///< index of its name
  uint32_t nodes = 0;
};

/// What one device's blocks tell.
struct DeviceViews {
  LiveSet live_set{};
  std::vector<StepCollector> steps{};  ///< as they were requested
  StepCurves curves{};
  std::vector<ReferrerEvents> referrers{};
};

/// All of them, and the table that they are views of.
struct AllocationViews {
  AllocationTable table{};
  std::vector<DeviceViews> devices{};  ///< as they were requested
};

/// The second pass over `trace`: follows every block from its allocation to its free.
AllocationViews follow_allocations(const Trace& trace, const TracePrescan& prescan, const NodeTable& nodes,
                                   const AllocatorSettings& settings, std::span<const ViewRequest> requested);

}  // namespace oomdiag
