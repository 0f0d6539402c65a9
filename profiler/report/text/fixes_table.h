#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/findings.h"
#include "profiler/report/report.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {

/// "yes", "no" or "unknown": whether it fits, as measured where it was run, else as predicted.
std::string_view verdict_on(const Fix& fix);

/// Whether `oomdiag fix` has run some of them.
bool were_measured(const std::vector<Fix>& fixes);

/// What would help, with predicted and measured peaks, what to paste and what it costs, and whether a single one is enough;
/// after a run that fits, what would lower its peak. Empty if there is nothing.
std::string fixes_table(const ReportOfDevice& device, const TextOptions& options);

/// The line "fix": the best fix with its line to change, its peak and whether it fits; where none is known to fit, how to find
/// out. Empty after a run that fits.
std::string best_fix_text(const Report& report, const ReportOfDevice& device, const TextOptions& options);

/// At most three fixes besides the best one: of those that fit; where none is known to, of those that may. A second one of a group, as
/// half the batch beside micro-batches, only where there is room.
std::string other_fixes_table(const ReportOfDevice& device, const TextOptions& options);

}  // namespace oomdiag
