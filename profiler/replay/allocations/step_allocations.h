#pragma once

#include "profiler/replay/allocations/allocation_pass.h"

namespace oomdiag {

/// The step that is to be told block by block: that of the failure, or of the peak or a later one like it.
uint32_t typical_step(const DeviceHistory& device);
/// That of DeviceHistory::complete; 0: there is none.
uint32_t complete_step(const Trace& trace, const Outline& outline, const DeviceHistory& device);

/// Reads the lives of a step's blocks from the slice that was taken of it. With them the peak can be computed that the step
/// would have had if some blocks were smaller, or lived shorter (explain/what_if.h). `refusal`: what ended it, or null.
StepLives read_step(const Trace& trace, const NodeTable& nodes, const Views& views, const StepSlice& slice,
                    const OutOfMemory* refusal);

}  // namespace oomdiag
