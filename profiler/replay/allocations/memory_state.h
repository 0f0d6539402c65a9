#pragma once

#include <vector>

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// The state of `device` at the failing allocation, else at the peak.
MemoryState read_moment(const Trace& trace, const FollowedTrace& followed, const FollowedDevice& device);

/// The blocks that the autograd graph keeps for backward which was traversed last, by the requested bytes.
std::vector<LiveBlock> read_last_walk(const Trace& trace);

}  // namespace oomdiag
