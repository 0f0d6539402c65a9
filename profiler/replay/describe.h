#pragma once

#include "profiler/replay/facts.h"
#include "profiler/replay/history.h"
#include "profiler/replay/join.h"
#include "profiler/replay/measure.h"

namespace oomdiag {

/// The second pass over a trace: the state of one card at the failure that `measured` ended with, else at its peak; every
/// block with its category, its maker and the nodes that keep it. The categories add up to the allocated bytes.
Moment describe(const Trace& trace, const Outline& outline, const Measured& measured, const NodeTable& nodes,
                const AllocatorSettings& settings);

}  // namespace oomdiag
