#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What the caller knows of a run and its trace does not.
struct ReportInputs {
  std::optional<int> exit_code{};          ///< of the diagnosed program
  std::optional<int> signal{};             ///< that killed it
  std::optional<int64_t> batch{};          ///< batch size; without it there are no predictions about others
  int64_t judged_bytes = 0;                ///< GPU that fixes are judged by; 0 = the one of the trace
  bool still_runs = false;                 ///< the program asks for a report on itself, or is looked at meanwhile
  std::string folder{};                    ///< where the report will lie, for the line "next:"
  std::vector<std::string> limitations{};  ///< to be listed with what the report does not know
};

/// Trace to report: replays, explains and words it. Pure: the same trace gives the same report.
Report make_report(const Trace& trace, const ReportInputs& inputs);
/// The same, and the history that it is made from, whose names are views into `trace`.
Report make_report(const Trace& trace, const ReportInputs& inputs, History& history);

}  // namespace oomdiag
