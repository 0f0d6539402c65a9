#pragma once

#include "profiler/explain/findings.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// The GPU with this index; where the trace does not describe it, one without a name.
Device find_gpu(const Trace& trace, int index);

/// Words what was found about one GPU.
ReportOfDevice report_device(const Trace& trace, const DeviceHistory& device, const Findings& findings);

}  // namespace oomdiag
