#pragma once

#include <cstdint>

#include "profiler/trace/format.h"

namespace oomdiag {

/// Fills in what the header of a trace says about this process and its GPUs.
void describe_process(TraceHeader& header);

/// Why the allocator that this process uses cannot be watched, in words; null where it can.
const char* find_allocator_obstacle();

}  // namespace oomdiag
