#pragma once

#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

/// The paragraph "case S10: …" of a report: sentences are wrapped, tables stay as they are.
std::string case_text(const ReportCase& reference_case);

}  // namespace oomdiag
