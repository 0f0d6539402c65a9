#include "profiler/report/make/report_work.h"

#include <algorithm>
#include <cmath>

#include "profiler/cost/operator_work.h"
#include "profiler/cost/step_work.h"
#include "profiler/cost/time_model.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

ReportWorkPart make_part(std::string name, const WorkSum& sum, bool has_time) {
  ReportWorkPart part{.name = std::move(name),
                      .flops = sum.flops,
                      .memory_bytes = sum.memory_bytes,
                      .bus_bytes = sum.bus_bytes,
                      .launches = sum.launches};
  if (!has_time) return part;
  part.time_ns = std::llround(sum.time_ns);
  part.bound_by = name_of(sum.bound_by());
  return part;
}

/// Most of the step's time first; where that is not known, most of its memory traffic.
void sort_parts(std::vector<ReportWorkPart>& parts) {
  std::ranges::stable_sort(parts, [](const ReportWorkPart& a, const ReportWorkPart& b) {
    return a.time_ns.value_or(a.memory_bytes) > b.time_ns.value_or(b.memory_bytes);
  });
}

}  // namespace

ReportWork make_report_work(const StepWork& step, const Trace& trace) {
  ReportWork work{.step = static_cast<uint32_t>(step.step),
                  .flops = step.all.flops,
                  .memory_bytes = step.all.memory_bytes,
                  .bus_bytes = step.all.bus_bytes,
                  .launches = step.all.launches,
                  .not_metered = step.not_metered,
                  .collectives = step.all.collectives,
                  .link_bytes = step.all.link_bytes};
  for (size_t i = 0; i < kWorkPrecisions; ++i) {
    if (step.flops[i] > 0) work.flops_by_dtype.emplace_back(name_of(static_cast<WorkPrecision>(i)), step.flops[i]);
  }
  if (step.has_time) {
    const ErrorOfModel error = error_of_model();
    const double ns = step.step_ns();
    work.step_time_ns = std::llround(ns);
    work.step_time_low_ns = std::llround(ns * error.low);
    work.step_time_high_ns = std::llround(ns * error.high);
    work.host_time_ns = std::llround(step.all.host_ns);
    if (work.collectives > 0) {
      work.communication_time_ns = std::llround(step.all.overlapped_ns + step.all.waited_for_ns);
      work.exposed_communication_time_ns = std::llround(step.exposed_communication_ns());
    }
    work.bound_by = name_of(step.bound_by());
    if (ns > 0) work.utilization_percent = std::llround(100 * step.peak_compute_ns / ns);
  }
  for (const auto& [name, sum] : step.phases) work.phases.push_back(make_part(name, sum, step.has_time));
  for (const auto& [index, sum] : step.modules) {
    if (index != 0) work.modules.push_back(make_part(std::string(trace.name(index)), sum, step.has_time));
  }
  sort_parts(work.phases);
  sort_parts(work.modules);
  return work;
}

}  // namespace oomdiag
