#pragma once

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/measure.h"

namespace oomdiag {

/// The moment of `history` that is to be described: the failing allocation, else the peak.
Instant find_instant(const Trace& trace, const DeviceHistory& history);

/// The blocks of a cut, as people read about them, by address.
std::vector<LiveBlock> describe_blocks(const Trace& trace, const Views& views, const Cut& cut, const NodeTable& nodes);

/// Reads it from the cut that was made there.
Moment read_moment(const Trace& trace, const Measured& measured, const NodeTable& nodes, const Views& views,
                   const Cut& cut);

}  // namespace oomdiag
