#pragma once

#include <cstdint>
#include <string>

#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Which moment a snapshot shows.
enum class SnapshotTime : uint8_t {
  end,        ///< that at which the recording ends
  described,  ///< the failure, else the peak: what each GPU's history describes
};

/// A pickle as torch.cuda.memory._dump_snapshot writes it, for memory_viz and _memory_viz.py: the segments at that moment, and
/// all that the trace holds of what happened before. Frames say more than PyTorch's own: node, op and module, in
/// backward those of the forward op, then the Python calls by which the line was first reached.
std::string to_snapshot(const Trace& trace, const History& history, SnapshotTime time);

}  // namespace oomdiag
