#pragma once

#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

/// Why the request was refused, in one sentence with the bytes that are the evidence. `device.cause` is there.
std::string cause_text(const ReportOfDevice& device);

}  // namespace oomdiag
