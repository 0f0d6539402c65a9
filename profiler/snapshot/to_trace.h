#pragma once

#include "profiler/snapshot/snapshot.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// The snapshot as a trace, so that it is replayed, explained and compared like one. Where the history begins in the middle,
/// the state before it is worked out backwards from the segments at the end: exact but for blocks that were freed since,
/// whose sizes are rounded as the allocator would. Without any history the trace has no events, only the segments as they
/// are. `process.snapshot` says that phases, steps and most categories are not known.
Trace to_trace(Snapshot snapshot);

}  // namespace oomdiag
