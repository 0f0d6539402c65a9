#pragma once

#include <string>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/report/make_report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What a report does not know, one sentence each: lost events, modelled figures, differences that the replay found.
std::vector<std::string> list_limits(const Trace& trace, const History& history, const ReportInputs& inputs);

}  // namespace oomdiag
