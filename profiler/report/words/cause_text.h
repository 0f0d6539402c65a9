#pragma once

#include <cstdint>
#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

/// Why the request failed, in one sentence with the bytes that are the evidence.
std::string cause_text(const ReportCause& cause);

/// "11.54 GiB to 20.57 GiB": a GPU on which the step gets through has what a complete run allocated and what is not PyTorch's, together
/// `least_bytes`, at least; and at most what the run reserved where memory was ample, `cached_bytes` more. One figure where they are near.
std::string required_range(int64_t least_bytes, int64_t cached_bytes);

/// Asks the rows of kCauses again, after something was added to `cause.evidence`.
void decide_again(ReportCause& cause);

}  // namespace oomdiag
