#pragma once

#include <string>

#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// A timeline in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open: counters of each card, and per thread
/// the scopes, modules and ops that allocated. Of very long traces the newest ops. `trace` may be null: counters and marks
/// only.
std::string to_perfetto(const Report& report, const Trace* trace);

}  // namespace oomdiag
