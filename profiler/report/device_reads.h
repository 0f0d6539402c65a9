#pragma once

#include <span>
#include <string>
#include <vector>

#include "profiler/replay/history.h"

namespace oomdiag {

/// Adds what the program read from a virtual card although no kernel had computed it: the reads that decide on a size or
/// a branch one by one, by op and line, the others in one sentence. `all_counted`: no read is missing, else the counts are lower bounds.
void add_reads(std::span<const DeviceRead> reads, bool all_counted, std::vector<std::string>& limits);

}  // namespace oomdiag
