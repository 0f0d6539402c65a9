#pragma once

#include <string>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// A timeline in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open: counters of each card, and per thread
/// the scopes, modules and ops that allocated. Of very long traces the newest ops. The step that the report describes is
/// counted by category. `trace` may be null: counters of the whole card and marks only. `history` is that of `trace`.
std::string to_perfetto(const Report& report, const Trace* trace, const History& history);

}  // namespace oomdiag
