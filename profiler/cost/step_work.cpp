#include "profiler/cost/step_work.h"

#include <algorithm>
#include <map>

#include "profiler/cost/communication.h"
#include "profiler/cost/metered_operator.h"
#include "profiler/cost/operator_work.h"
#include "profiler/cost/time_model.h"
#include "profiler/meter_words.h"

namespace oomdiag {
namespace {

void add_work(WorkSum& sum, const OperatorWork& work, double host_ns, const std::optional<ModelledTime>& time,
              int64_t count, bool is_beside) {
  sum.flops += work.flops() * count;
  sum.memory_bytes += (work.bus_bytes > 0 ? 0 : work.memory_bytes) * count;
  sum.bus_bytes += work.bus_bytes * count;
  sum.launches += work.launches * count;
  sum.host_ns += host_ns * static_cast<double>(count);
  if (!time) return;
  const double ns = time->ns * static_cast<double>(count);
  if (is_beside) {
    sum.overlapped += count;
    sum.overlapped_ns += ns;
    return;
  }
  sum.time_ns += ns;
  sum.bound_ns[static_cast<size_t>(time->bound_by)] += ns;
}

/// What the host takes to submit it in this phase: a usual one where the device is not known.
double submission_ns(std::string_view phase, const MeteredOperator& metered, const OperatorWork& work,
                     const DeviceRates* rates) {
  return host_ns(metered.name == kViews ? kViews : phase, work, rates != nullptr ? *rates : DeviceRates{});
}

/// A collective runs on a stream of its own.
void add_work(StepWork& step, const MeteredOperator& metered, const Communication& call,
              const std::optional<Links>& links, const DeviceRates* rates) {
  const auto time = links ? communication_ns(call, *links) : std::nullopt;
  step.has_time = step.has_time && time.has_value();
  const auto count = static_cast<double>(metered.count);
  for (WorkSum* sum : {&step.all, &step.phases[metered.phase], &step.modules[metered.module]}) {
    sum->collectives += metered.count;
    sum->link_bytes += static_cast<int64_t>(call.bytes_on_links() * count);
    (call.is_waited_for ? sum->waited_for_ns : sum->overlapped_ns) += time.value_or(0) * count;
    sum->overlapped += call.is_waited_for ? 0 : metered.count;
    sum->host_ns += submission_ns(metered.phase, metered, {}, rates) * count;
  }
}

void add_work(StepWork& step, const MeteredOperator& metered, const DeviceRates* rates) {
  const OperatorWork work = work_of(metered);
  const auto time = rates != nullptr ? modelled_time(work, *rates) : std::nullopt;
  step.has_time = step.has_time && time.has_value();
  if (!work.is_metered) step.not_metered += metered.count;
  const int64_t flops = work.flops() * metered.count;
  step.flops[static_cast<size_t>(work.precision)] += flops;
  if (rates != nullptr) step.peak_compute_ns += full_rate_ns(work, *rates) * static_cast<double>(metered.count);
  const bool is_beside = metered.on_own_stream && work.bus_bytes > 0;
  for (WorkSum* sum : {&step.all, &step.phases[metered.phase], &step.modules[metered.module]}) {
    add_work(*sum, work, submission_ns(metered.phase, metered, work, rates), time, metered.count, is_beside);
  }
  if (metered.phase != "forward") return;
  add_work(step.forward[metered.module], work, submission_ns("recomputation", metered, work, rates), time,
           metered.count, is_beside);
}

/// The newest of the steps that were over and have a forward pass; of those whose forward makes as many calls as that of most:
/// the step in which an evaluation falls is not one like the others. 0 where no step was.
int64_t find_last_step(const MeteredRun& run) {
  std::map<int64_t, int64_t> calls;  // of forward, by step
  for (const MeteredOperator& metered : run.operators) {
    if (metered.step <= run.steps && metered.phase == "forward") calls[metered.step] += metered.count;
  }
  std::map<int64_t, int64_t> alike;  // steps, by their calls
  for (const auto& [step, count] : calls) ++alike[count];
  int64_t last = 0, most = 0;
  for (const auto& [step, count] : calls) {
    if (alike[count] >= most) last = step, most = alike[count];
  }
  return last;
}

}  // namespace

BoundBy WorkSum::bound_by() const {
  return static_cast<BoundBy>(std::max_element(bound_ns.begin(), bound_ns.end()) - bound_ns.begin());
}

double StepWork::exposed_communication_ns() const {
  double exposed = 0;
  for (const auto& [phase, sum] : phases) {
    const double one = sum.overlapped_ns / static_cast<double>(std::max<int64_t>(sum.overlapped, 1));
    exposed += sum.waited_for_ns + std::max(one, sum.overlapped_ns - sum.time_ns);
  }
  return exposed;
}

BoundBy StepWork::bound_by() const {
  if (all.host_ns > gpu_ns()) return BoundBy::host;
  const double longest = *std::max_element(all.bound_ns.begin(), all.bound_ns.end());
  return exposed_communication_ns() > longest ? BoundBy::communication : all.bound_by();
}

std::optional<StepWork> work_of_last_step(const MeteredRun& run, const DeviceRates* rates, bool ended) {
  StepWork step{.step = find_last_step(run), .has_time = rates != nullptr};
  if (step.step == 0 && (run.steps > 0 || !ended)) return std::nullopt;
  const auto links = rates != nullptr ? std::optional(links_of(*rates, run.links, run.ranks_per_host)) : std::nullopt;
  for (const MeteredOperator& metered : run.operators) {
    const bool is_of_it =
        step.step == 0 ? metered.phase != "setup" : metered.step == step.step && metered.phase != "setup";
    if (!is_of_it) continue;
    if (const auto call = communication_of(metered)) {
      add_work(step, metered, *call, links, rates);
    } else {
      add_work(step, metered, rates);
    }
  }
  return step;
}

}  // namespace oomdiag
