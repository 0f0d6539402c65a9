#pragma once

#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

/// Why the request failed, in one sentence with the bytes that are the evidence.
std::string cause_text(const ReportCause& cause);

/// Asks the rows of kCauses again, after something was added to `cause.evidence`.
void decide_again(ReportCause& cause);

}  // namespace oomdiag
