#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/replay/join.h"
#include "profiler/replay/outline.h"

// The step that holds the described moment, block by block: when each was allocated, when freed, and what it held. With
// it the peak can be computed that the step would have had if some blocks were smaller, or lived shorter (explain/what_if.h).
namespace oomdiag {

/// Follows the blocks of `device` in the step of its peak (or a later one like it), or in the step that failed up to the failure.
StepLives follow_lives(const Trace& trace, const Outline& outline, const NodeTable& nodes, const DeviceHistory& device,
                       const AllocatorSettings& settings);

}  // namespace oomdiag
