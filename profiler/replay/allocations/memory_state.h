#pragma once

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/measure.h"

namespace oomdiag {

/// The moment of `history` that is to be described: the failing allocation, else the peak.
StatePoint find_state_point(const Trace& trace, const DeviceHistory& history);

/// The blocks of a live set, as people read about them, by address.
std::vector<LiveBlock> describe_blocks(const Trace& trace, const AllocationViews& views, const LiveSet& live_set,
                                       const NodeTable& nodes);

/// Reads it from the cut that was made there.
MemoryState read_moment(const Trace& trace, const MeasuredDevice& measured, const NodeTable& nodes,
                        const AllocationViews& views, const LiveSet& live_set);

}  // namespace oomdiag
