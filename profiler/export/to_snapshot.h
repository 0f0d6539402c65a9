#pragma once

#include <string>

#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// A pickle as torch.cuda.memory._dump_snapshot writes it, for memory_viz and _memory_viz.py: the segments at the moment that
/// each card's history describes, and what happened up to it. Frames tell more than PyTorch's own: op, module and line, in
/// backward those of the forward op. Of very long traces the newest million events.
std::string to_snapshot(const Trace& trace, const History& history);

}  // namespace oomdiag
