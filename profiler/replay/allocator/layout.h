#pragma once

#include <span>

#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// What a segment looks like whose blocks, in address order, are these.
SegmentLayout lay_out(std::span<const Block> segment);

}  // namespace oomdiag
