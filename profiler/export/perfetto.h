#pragma once

#include <cstdint>
#include <string>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// A timeline in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open. Per process counters of each GPU, and
/// by thread the scopes, modules and ops that allocated; of very long traces the newest ops. The step that the report describes
/// is counted by category.
class PerfettoTimeline {
 public:
  /// Adds a process, the first to record before the others: time runs from its start. `trace` may be null: then counters
  /// of the whole GPU and marks only. `history` is that of `trace`. All may go afterwards.
  void add(const Report& report, const Trace* trace, const History& history);

  std::string finish() &&;

 private:
  std::string events_;     ///< as JSON, one on a line
  uint64_t begin_ns_ = 0;  ///< CLOCK_MONOTONIC when the first process began
};

}  // namespace oomdiag
