#pragma once

#include <span>
#include <string>
#include <vector>

#include "profiler/replay/history.h"

namespace oomdiag {

/// Adds what the program read from a virtual GPU although no kernel had computed it: a sentence on reads that decide on
/// sizes, by op and line, and one on the others. `all_counted`: no read is missing, else the counts are lower bounds.
void add_reads(std::span<const DeviceRead> reads, bool all_counted, std::vector<std::string>& limitations);

/// Whether sizes hung on such reads: then peaks are a lower bound.
bool depends_on_data(std::span<const DeviceRead> reads);

}  // namespace oomdiag
