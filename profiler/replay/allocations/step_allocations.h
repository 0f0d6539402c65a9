#pragma once

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Whether DeviceHistory::complete is known of `device`: the step before the failing one is there as a whole.
bool has_complete_step(const Trace& trace, const TracePrescan& prescan, const FollowedDevice& device);

/// Describes the allocations of a step of `device`. With them the peak can be computed that the step
/// would have had if some blocks were smaller, or lived shorter (explain/what_if.h). `oom`: what ended it, or null.
StepAllocations read_step(const Trace& trace, const FollowedTrace& followed, const FollowedDevice& device,
                          const StepCollector& taken, const OutOfMemory* oom);

}  // namespace oomdiag
