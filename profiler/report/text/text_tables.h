#pragma once

#include <string>

#include "profiler/report/report.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {

/// The largest free blocks that cannot be given back and what blocks them; empty unless fragmentation is the cause.
std::string free_blocks_table(const ReportOfDevice& device);
/// Who holds pinned host memory; empty where it is less than a GiB.
std::string pinned_host_memory_table(const ReportOfDevice& device);
/// What the optimizer's parameter groups take; empty where there are not several.
std::string groups_table(const ReportOfDevice& device);
/// What keeps growing from step to step, where, and by how much; empty if nothing does.
std::string growth_table(const ReportOfDevice& device, const TextOptions& options);
/// The places that the program marked, with what was allocated there; empty without marks.
std::string marks_table(const ReportOfDevice& device);

}  // namespace oomdiag
