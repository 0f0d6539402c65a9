#pragma once

#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

/// The processes of a job side by side, and which of them needs more than the others; empty for a single process.
std::string ranks_table(const Report& report);

/// The GPUs of one process, and how far each got; empty if there is one, or if there are several processes.
std::string gpus_table(const Report& report);

}  // namespace oomdiag
