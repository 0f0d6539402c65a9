#pragma once

#include <string>

#include "profiler/report/report.h"
#include "profiler/report/text.h"

namespace oomdiag {

/// Who holds the card, with bars; adds up to the card. Under each category that matters stand those who hold most of it, until
/// four fifths are named.
std::string holders_table(const ReportOfDevice& device, const TextOptions& options);

/// The lines that hold most, where there are several; empty else.
std::string lines_table(const ReportOfDevice& device);

}  // namespace oomdiag
