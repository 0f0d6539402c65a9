#pragma once

#include <vector>

#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// The blocks that the autograd graph keeps for backward which was walked last, by the requested bytes.
std::vector<LiveBlock> read_last_walk(const Trace& trace);

}  // namespace oomdiag
