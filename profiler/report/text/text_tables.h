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

/// The processes of a job side by side, and which of them needs more than the others; empty for a single process.
std::string ranks_table(const Report& report);

/// The GPUs of one process, and how far each got; empty if there is one, or if there are several processes.
std::string gpus_table(const Report& report);

}  // namespace oomdiag
