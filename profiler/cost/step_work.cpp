#include "profiler/cost/step_work.h"

#include <algorithm>

#include "profiler/cost/operator_work.h"

namespace oomdiag {
namespace {

void add(WorkSum& sum, std::string_view phase, const OperatorWork& work, const std::optional<ModelledTime>& time,
         int64_t count) {
  sum.flops += work.flops() * count;
  sum.memory_bytes += (work.bus_bytes > 0 ? 0 : work.memory_bytes) * count;
  sum.bus_bytes += work.bus_bytes * count;
  sum.launches += work.launches * count;
  sum.host_ns += host_ns(phase, work) * static_cast<double>(count);
  if (!time) return;
  const double ns = time->ns * static_cast<double>(count);
  sum.time_ns += ns;
  sum.bound_ns[static_cast<size_t>(time->bound_by)] += ns;
}

void add(StepWork& step, const MeteredOperator& metered, const DeviceRates* rates) {
  const OperatorWork work = work_of(metered);
  const auto time = rates != nullptr ? modelled_time(work, *rates) : std::nullopt;
  step.has_time = step.has_time && time.has_value();
  if (!work.is_metered) step.not_metered += metered.count;
  const int64_t flops = work.flops() * metered.count;
  step.flops[static_cast<size_t>(work.precision)] += flops;
  if (rates != nullptr) step.peak_compute_ns += full_rate_ns(work, *rates) * static_cast<double>(metered.count);
  for (WorkSum* sum : {&step.all, &step.phases[metered.phase], &step.modules[metered.module]}) {
    add(*sum, metered.phase, work, time, metered.count);
  }
  if (metered.phase != "forward") return;
  add(step.forward[metered.module], "recomputation", work, time, metered.count);
}

/// The newest step that was over and began with a forward pass; 0 where no step was.
int64_t find_last_step(const MeteredRun& run) {
  int64_t last = 0;
  for (const MeteredOperator& metered : run.operators) {
    if (metered.step <= run.steps && metered.phase == "forward") last = std::max(last, metered.step);
  }
  return last;
}

}  // namespace

BoundBy WorkSum::bound_by() const {
  return static_cast<BoundBy>(std::max_element(bound_ns.begin(), bound_ns.end()) - bound_ns.begin());
}

std::optional<StepWork> work_of_last_step(const MeteredRun& run, const DeviceRates* rates, bool ended) {
  StepWork step{.step = find_last_step(run), .has_time = rates != nullptr};
  if (step.step == 0 && (run.steps > 0 || !ended)) return std::nullopt;
  for (const MeteredOperator& metered : run.operators) {
    const bool is_of_it =
        step.step == 0 ? metered.phase != "setup" : metered.step == step.step && metered.phase != "setup";
    if (is_of_it) add(step, metered, rates);
  }
  return step;
}

}  // namespace oomdiag
