#pragma once

#include <string_view>

#include "profiler/explain/findings.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// The card with this index; where the trace does not describe it, one without a name.
Device find_card(const Trace& trace, int index);

/// Words what was found about one card.
ReportOfDevice report_device(const Trace& trace, const DeviceHistory& device, const Findings& findings);

/// The dimensions in a text like "[64, 32] float32", as far as they can be read.
std::vector<int64_t> parse_shape(std::string_view text);
/// The type behind the dimensions, "float32".
std::string_view parse_dtype(std::string_view text);

}  // namespace oomdiag
