#pragma once

#include <optional>

#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Replays a trace. `survived` says whether the program is known to have ended well (then no OOM was fatal); where it is
/// not known, an OOM counts as fatal if neither forward ops nor optimizer steps follow it.
/// Time is linear in the events, memory in the blocks alive at once and in the autograd nodes.
History replay(const Trace& trace, std::optional<bool> survived = {});
History replay(const Trace&& trace, std::optional<bool> survived = {}) = delete;  // the history's names are the trace's

}  // namespace oomdiag
