#pragma once

#include <string>

#include "profiler/report/report.h"
#include "profiler/report/words/text_options.h"  // IWYU pragma: export

namespace oomdiag {

/// The report as people read it in a terminal. The first screen answers: where, requested, why, kept by, the best fix, at most
/// three others, GPU memory, the next command. No colours. At most 100 columns but for code and causes, one unit per table.
std::string to_text(const Report& report, const TextOptions& options = {});

/// The paragraph "case S10: …" of a report: sentences are wrapped, tables stay as they are.
std::string case_text(const ReportCase& reference_case);

}  // namespace oomdiag
