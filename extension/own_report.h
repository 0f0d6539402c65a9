#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// The trace of this process as far as it is written. Throws Error(usage) if there is none.
Trace read_own_trace();
/// The report on it.
Report make_own_report();
/// Bytes by "who made it → who keeps it, shape".
std::map<std::string, int64_t> sum_saved_tensors(const std::vector<ReportSavedTensor>& tensors);

}  // namespace oomdiag
