#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/report/make/make_report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Of a GPU whose failure cut the first step short. A whole run on another GPU takes it back (whole_run.h).
inline constexpr std::string_view kNoWholeStep =
    "no complete step was recorded: fixes are lower bounds; oomdiag fix measures them";

/// What a report does not know, one sentence each: lost events, modelled figures, differences that the replay found.
std::vector<std::string> list_limitations(const Trace& trace, const History& history, const ReportInputs& inputs);

}  // namespace oomdiag
