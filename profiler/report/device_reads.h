#pragma once

#include <string>
#include <vector>

#include "profiler/trace/trace.h"

namespace oomdiag {

/// Adds what the program read from a virtual card although no kernel had computed it: the reads that decide on a size or
/// a branch one by one, by op and line, the others in one sentence.
void add_reads(const Trace& trace, std::vector<std::string>& limits);

}  // namespace oomdiag
