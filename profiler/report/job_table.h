#pragma once

#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

/// The processes of a job side by side, and which of them needs more than the others; empty for a single process.
std::string ranks_table(const Report& report);

}  // namespace oomdiag
