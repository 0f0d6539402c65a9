#pragma once

#include <optional>
#include <string>

#include "profiler/cost/step_work.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What a step of a metered run does, its modules by the names of `trace`.
ReportWork make_report_work(const StepWork& step, const Trace& trace);

/// "556" or "8.25" of so many nanoseconds, "-" where they are not known.
std::string milliseconds_text(std::optional<int64_t> ns);

/// The lines "step time" and "work" of the first screen; empty where nothing was metered.
std::string work_text(const Report& report);

/// A table of phases and modules; likewise.
std::string work_table(const Report& report);

}  // namespace oomdiag
