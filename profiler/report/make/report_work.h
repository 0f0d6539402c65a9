#pragma once

#include "profiler/cost/step_work.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What a step of a metered run does, its modules by the names of `trace`.
ReportWork make_report_work(const StepWork& step, const Trace& trace);

}  // namespace oomdiag
