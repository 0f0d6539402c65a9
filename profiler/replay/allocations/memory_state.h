#pragma once

#include <vector>

#include "profiler/replay/allocations/allocation_pass.h"

namespace oomdiag {

/// The blocks of a live set, as people read about them, by address.
std::vector<LiveBlock> describe_blocks(const Trace& trace, const FollowedTrace& followed, const LiveSet& live_set);

/// The state of `device` at the failing allocation, else at the peak.
MemoryState read_moment(const Trace& trace, const FollowedTrace& followed, const FollowedDevice& device);

}  // namespace oomdiag
