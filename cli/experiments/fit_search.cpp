#include <fmt/format.h>

#include <algorithm>

#include "cli/device/device.h"
#include "cli/experiments/border_search.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_function.h"
#include "cli/process/workers.h"
#include "profiler/error.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/report/make/whole_run.h"
#include "profiler/shape_function/allocation_sequence.h"

// Runs end when their peak is steady; what the search finds from them then runs on to the program's end. The driver gives
// memory in pages of 2 MiB, so that is how exact the smallest GPU can be.

namespace oomdiag {
namespace {

constexpr int64_t kPageBytes = kRoundLargeBytes;
constexpr int64_t kLeastGpu = 256 * kMiB;

}  // namespace

std::vector<std::string> fill_in(std::vector<std::string> program, const Values& values) {
  for (std::string& word : program) {
    for (const auto& [name, value] : values) {
      const std::string what = "{" + name + "}", by = std::to_string(value);
      for (size_t at = 0; (at = word.find(what, at)) != word.npos; at += by.size()) word.replace(at, what.size(), by);
    }
  }
  return program;
}

std::vector<FitRun> Fitter::run(const std::vector<std::pair<Values, int64_t>>& cases) {
  return run_for(Purpose::search, cases);
}

std::vector<FitRun> Fitter::learn(const std::vector<Values>& cases) {
  std::vector<std::pair<Values, int64_t>> on_largest;
  for (const Values& values : cases) on_largest.emplace_back(values, kMaxGpuBytes);
  return run_for(Purpose::learn, on_largest);
}

std::vector<FitRun> Fitter::prove(const std::vector<Values>& cases) {
  std::vector<std::pair<Values, int64_t>> on_gpu;
  for (const Values& values : cases) on_gpu.emplace_back(values, 0);
  return run_for(Purpose::prove, on_gpu);
}

const FitRun* Fitter::find_on_gpu(const Values& values) const {
  const auto found = std::ranges::find_if(runs_, [&](const FitRun& run) {
    return run.values == values && run.memory_bytes == 0 && !run.learns && is_far_enough(run);
  });
  return found == runs_.end() ? nullptr : &*found;
}

int64_t Fitter::gpu_bytes() const {
  const VirtualHost* const host = request_.device.virtual_host();
  return host == nullptr ? 0 : host->bytes_of_device();
}

namespace {

std::string hint_of(const Experiment& failed) {
  if (failed.why.find("invalid device ordinal") == failed.why.npos) return "oomdiag run shows all that it says";
  return "it asks for more GPUs than there are: --count N gives it N of them";
}

}  // namespace

std::vector<FitRun> Fitter::run_for(Purpose purpose, const std::vector<std::pair<Values, int64_t>>& cases) {
  std::vector<ExperimentRequest> requests;
  for (const auto& [values, memory_bytes] : cases) {
    ExperimentRequest& request = requests.emplace_back(
        ExperimentRequest{.program = fill_in(request_.program, values),
                          .device = request_.device,
                          .fixes = request_.fixes_of ? request_.fixes_of(values) : nullptr,
                          .steady = rule_for(purpose),
                          .keeps_allocations = purpose == Purpose::learn || purpose == Purpose::prove});
    auto* const host = std::get_if<VirtualHost>(&request.device.device);
    if (memory_bytes > 0 && host != nullptr) host->memory_bytes = memory_bytes;
  }
  const auto run_of = [&](std::size_t i, Experiment experiment) {
    return FitRun{.values = cases[i].first,
                  .memory_bytes = cases[i].second,
                  .experiment = std::move(experiment),
                  .learns = purpose == Purpose::learn,
                  .goes_on = requests[i].steady.to_end,
                  .gpu_bytes = gpu_bytes()};
  };
  std::vector<Experiment> experiments;
  try {
    experiments = experiments_.run(requests, on_done_);
  } catch (const Interrupted&) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (const auto& experiment = experiments_.finished()[i]) runs_.push_back(run_of(i, *experiment));
    }
    throw;
  }
  std::vector<FitRun> runs;
  for (std::size_t i = 0; i < experiments.size(); ++i) {
    if (!experiments[i].passed() && !experiments[i].ran_out()) {
      throw Error(ErrorKind::environment,
                  fmt::format("with {} the program fails, and not for want of memory: {}",
                              cases[i].first.empty() ? "a run" : describe(cases[i].first), experiments[i].why),
                  hint_of(experiments[i]));
    }
    runs.push_back(run_of(i, std::move(experiments[i])));
    runs.back().experiment.report.reset();
    std::optional<AllocationSequence> allocations = std::exchange(runs.back().experiment.allocations, std::nullopt);
    runs_.push_back(runs.back());  // what is remembered needs no allocations
    runs.back().experiment.allocations = std::move(allocations);
  }
  return runs;
}

SteadyRule Fitter::rule_for(Purpose purpose) const {
  if (request_.to_end) return {.to_end = true};
  if (purpose == Purpose::go_on || all_go_on_) return {.to_end = true, .longest = kLongestRun};
  return {.steps = std::max(request_.steps, least_steps_)};
}

bool Fitter::is_far_enough(const FitRun& run) const {
  if (!run.experiment.passed() || run.is_whole() || run.goes_on) return true;
  return !all_go_on_ && run.experiment.stopped_at_step > least_steps_;
}

bool Fitter::holds_to_end(const Values& values, int64_t memory_bytes) {
  if (request_.steps > 0) return true;
  const bool is_known = std::ranges::any_of(runs_, [&](const FitRun& run) {
    return run.values == values && (run.memory_bytes == memory_bytes || (run.learns && memory_bytes == 0)) &&
           fits(run) == Fits::yes && (run.is_whole() || run.goes_on);
  });
  if (is_known) return true;
  const Experiment run = run_for(Purpose::go_on, {{values, memory_bytes}}).front().experiment;
  if (run.passed()) return true;
  all_go_on_ = least_steps_ > 0 || run.failed_at_step == 0;
  least_steps_ = run.failed_at_step;
  return false;
}

Fits fits(const FitRun& run) {
  const Experiment& experiment = run.experiment;
  if (!experiment.passed()) return experiment.ran_out() ? Fits::no : Fits::unknown;
  if (!run.learns) return Fits::yes;
  const int64_t available = experiment.available_bytes(run.gpu_bytes);
  if (experiment.needed_bytes <= available) return Fits::yes;
  return experiment.allocated_bytes > available ? Fits::no : Fits::unknown;
}

int Fitter::at_once() const { return request_.device.is_virtual() ? std::max(1, programs_at_once(0)) : 1; }

namespace {

Point point_of(const Experiment& experiment) {
  return {.passes = experiment.passed(),
          .allocated_bytes = experiment.allocated_bytes,
          .needed_bytes = experiment.needed_bytes,
          .available_bytes = experiment.available_bytes(experiment.total_bytes)};
}

/// Runs on this GPU, and those on the largest one that show what they would do here.
void take_earlier(BorderSearch& search, const Fitter& fitter, const Variable& variable, const Values& others) {
  for (const FitRun& run : fitter.runs()) {
    const auto value = run.values.find(variable.name);
    if (value == run.values.end()) continue;
    const int64_t position = variable.position_of(static_cast<double>(value->second));
    Values values = others;
    values[variable.name] = variable.value(position);
    if (run.values != values) continue;
    if (!fitter.is_far_enough(run) || (run.learns && fits(run) != Fits::yes)) continue;
    Point point = point_of(run.experiment);
    if (run.learns) point.available_bytes = run.experiment.available_bytes(run.gpu_bytes);
    search.take(position, point);
  }
}

}  // namespace

LargestValue find_largest_value(Fitter& fitter, const Variable& variable, const Values& others,
                                const std::optional<Line>& prior, MemoryFunction& function, bool may_believe) {
  if (const auto known = find_largest_by_function(fitter, variable, others, function, may_believe)) return *known;
  BorderSearch search(
      variable.count(), [&](int64_t i) { return variable.value(i); }, fitter.most_runs(), prior);
  take_earlier(search, fitter, variable, others);
  run_search(search, fitter.at_once(), [&](const std::vector<int64_t>& positions) {
    std::vector<std::pair<Values, int64_t>> cases;
    for (const int64_t position : positions) {
      cases.emplace_back(others, 0);
      cases.back().first[variable.name] = variable.value(position);
    }
    std::vector<Point> points;
    for (const FitRun& run : fitter.run(cases)) points.push_back(point_of(run.experiment));
    return std::optional(std::move(points));
  });
  LargestValue largest{.others = others, .doubt = function.unknown(), .line = search.line()};
  const std::optional<int64_t> found = search.found();
  if (!found) return largest;
  largest.value = variable.value(*found);
  largest.may_pass_above = search.may_pass_above();
  largest.is_last_of_range = *found == variable.count() - 1;
  for (const auto& [position, point] : search.points()) {
    if (position > *found && position <= *found + BorderSearch::kNeighbours) {
      largest.failed_above.push_back(variable.value(position));
    }
  }
  return largest;
}

namespace {

/// Where it fails with a page less.
SmallestGpu with_place(SmallestGpu gpu, const Fitter& fitter, const Values& values) {
  for (const FitRun& run : fitter.runs()) {
    if (run.memory_bytes == gpu.bytes - kPageBytes && run.values == values) gpu.fails_in = run.experiment.place;
  }
  return gpu;
}

// Where the run passes with headroom, it mostly needs at least what it allocated and at most what it reserved, beside
// what others hold. In between the allocator gives cached segments back and tries again; its
// algorithm is run on what the program asked for (fit_function.h), and the border proved by two runs. Where little is free,
// libraries choose other algorithms, which may take more or less than that: then only runs can show it.
SmallestGpu find_steady_gpu(Fitter& fitter, const Values& values) {
  const int at_once = fitter.at_once();
  const Experiment large = fitter.learn({values}).front().experiment;
  if (!large.passed()) return {.bytes = 0, .non_pytorch_bytes = 0, .fails_in = large.place};
  SmallestGpu gpu{.bytes = 0,
                  .non_pytorch_bytes = large.non_pytorch_bytes,
                  .takes_share = is_share_of_gpu(large.allocated_bytes, large.total_bytes)};
  const TryValues try_values = [&](const std::vector<int64_t>& sizes) {
    std::vector<std::pair<Values, int64_t>> cases;
    for (const int64_t bytes : sizes) cases.emplace_back(values, bytes);
    std::vector<bool> passed;
    for (const FitRun& run : fitter.run(cases)) passed.push_back(run.experiment.passed());
    return passed;
  };
  const int64_t held = large.non_pytorch_bytes + large.allocated_bytes;
  const int64_t passes = std::max(kLeastGpu + kPageBytes, large.non_pytorch_bytes + large.reserved_bytes + kPageBytes);
  Bracket guess{.fails = held - kPageBytes, .passes = passes};
  const MemoryFunction function = MemoryFunction::of_one_run(large);
  if (function.is_known()) {
    guess.passes = find_smallest_gpu_by_function(function, values, kLeastGpu, passes + passes / 8, kPageBytes);
    guess.fails = guess.passes - kPageBytes;
  }
  const Bracket around = find_bracket(guess, kPageBytes, kLeastGpu, kMaxGpuBytes, try_values);
  gpu.bytes = find_smallest(around.fails, around.passes, kPageBytes, at_once, try_values);
  if (function.is_known() && around == guess) return with_place(gpu, fitter, values);  // smaller ones were computed
  for (int64_t below = 1; below <= kPagesBelow && gpu.bytes - below * kPageBytes >= kLeastGpu;) {
    const int64_t bytes = gpu.bytes - below * kPageBytes;
    const auto known = std::find_if(fitter.runs().begin(), fitter.runs().end(), [&](const FitRun& run) {
      return run.memory_bytes == bytes && run.values == values && fitter.is_far_enough(run);
    });
    const bool passed = known != fitter.runs().end() ? known->experiment.passed() : try_values({bytes}).front();
    if (passed) gpu.bytes = bytes;
    below = passed ? 1 : below + 1;
  }
  return with_place(gpu, fitter, values);
}

}  // namespace

SmallestGpu find_smallest_gpu(Fitter& fitter, const Values& values) {
  for (;;) {
    SmallestGpu gpu = find_steady_gpu(fitter, values);
    if (gpu.bytes == 0 || fitter.holds_to_end(values, gpu.bytes)) return gpu;
  }
}

}  // namespace oomdiag
