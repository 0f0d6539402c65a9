#pragma once

#include "profiler/replay/allocations/allocation_pass.h"

namespace oomdiag {

/// The step that is to be told block by block: that of the failure, or of the peak or a later one like it.
uint32_t typical_step(const DeviceHistory& device);
/// That of DeviceHistory::complete; 0: there is none.
uint32_t complete_step(const Trace& trace, const TracePrescan& prescan, const DeviceHistory& device);

/// Describes the allocations of a step. With them the peak can be computed that the step
/// would have had if some blocks were smaller, or lived shorter (explain/what_if.h). `refusal`: what ended it, or null.
StepAllocations read_step(const Trace& trace, const NodeTable& nodes, const AllocationViews& views,
                          const StepCollector& taken, const OutOfMemory* refusal);

}  // namespace oomdiag
