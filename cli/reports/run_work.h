#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What a step of a metered run does, by the file that the recorder left beside the trace `file`, and how long it takes on the GPU of
/// `report`. None where the run was not metered, or no step of it was complete.
std::optional<ReportWork> read_run_work(const std::filesystem::path& file, const Trace& trace, const Report& report);

/// Modelled nanoseconds of the forward of that step, by the module that its operators ran in; empty where there is no time.
std::map<std::string, double> read_forward_times(const std::filesystem::path& file, const Trace& trace,
                                                 const Report& report);

/// A line for each operator, module and set of shapes of the steps that the meter kept, as CSV: what it does, and how long that
/// takes at the full rates of `device` (a name as after --device; empty: the GPU of the report) and modelled. Throws Error(usage) where
/// there is nothing.
std::string work_to_csv(const std::filesystem::path& file, const Trace& trace, const Report& report,
                        const std::string& device);

}  // namespace oomdiag
