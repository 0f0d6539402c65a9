#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What the pass over all events but the prescan tells.
struct FollowedTrace {
  AllocationTable table{};
  std::vector<FollowedDevice> devices{};  ///< those that were used
  NodeTable nodes{};
  uint32_t steps = 0;  ///< the last one that began
};

/// Follows every block of `trace` from its allocation to its free. The state that is kept is that of the failure of
/// `prescan`, else of the peak; with `at` that at this point, on every device.
FollowedTrace follow_allocations(const Trace& trace, const TracePrescan& prescan,
                                 const std::optional<StatePoint>& at = {});

}  // namespace oomdiag
