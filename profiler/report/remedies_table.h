#pragma once

#include <string>
#include <string_view>

#include "profiler/report/report.h"
#include "profiler/report/text.h"

namespace oomdiag {

/// "yes", "no" or "unknown": whether it fits, as measured where it was run, else as predicted.
std::string_view verdict_on(const Remedy& remedy);

/// What would help, with predicted and measured peaks, what to paste and what it costs, and whether a single one is enough;
/// after a run that fits, what would lower its peak. Empty if there is nothing.
std::string remedies_table(const ReportOfDevice& device, const TextOptions& options);

}  // namespace oomdiag
