#pragma once

#include <string>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What the autograd graph that was walked last keeps for backward, largest first; each storage once, parameters apart.
std::vector<ReportSavedTensor> list_last_walk(const Trace& trace);

/// What is said of a block that is saved for backward.
ReportSavedTensor report_saved(const LiveBlock& block);

/// "relu1 → pool1  [6800, 32, 64, 64] float32": who made it, who keeps it, what it is.
std::string label_of(const ReportSavedTensor& tensor);

}  // namespace oomdiag
