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

// Each run is a whole run of the program on a virtual GPU. The driver gives memory in pages of 2 MiB, so that is how exact
// the smallest GPU can be.

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
  const auto found = std::ranges::find_if(
      runs_, [&](const FitRun& run) { return run.values == values && run.memory_bytes == 0 && !run.learns; });
  return found == runs_.end() ? nullptr : &*found;
}

int64_t Fitter::gpu_bytes() const {
  const VirtualHost* const host = request_.device.virtual_host();
  return host == nullptr ? 0 : host->bytes_of_device();
}

std::vector<FitRun> Fitter::run_for(Purpose purpose, const std::vector<std::pair<Values, int64_t>>& cases) {
  std::vector<ExperimentRequest> requests;
  for (const auto& [values, memory_bytes] : cases) {
    ExperimentRequest& request =
        requests.emplace_back(ExperimentRequest{.program = fill_in(request_.program, values),
                                                .device = request_.device,
                                                .fixes = request_.fixes_of ? request_.fixes_of(values) : nullptr,
                                                .steady = {.steps = request_.steps},
                                                .keeps_allocations = purpose != Purpose::search});
    auto* const host = std::get_if<VirtualHost>(&request.device.device);
    if (memory_bytes > 0 && host != nullptr) host->memory_bytes = memory_bytes;
  }
  std::vector<Experiment> experiments;
  try {
    experiments = experiments_.run(requests, on_done_);
  } catch (const Interrupted&) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const std::optional<Experiment>& experiment = experiments_.finished()[i];
      if (experiment)
        runs_.push_back({.values = cases[i].first, .memory_bytes = cases[i].second, .experiment = *experiment});
    }
    throw;
  }
  std::vector<FitRun> runs;
  for (std::size_t i = 0; i < experiments.size(); ++i) {
    if (!experiments[i].passed() && !experiments[i].ran_out()) {
      throw Error(ErrorKind::environment,
                  fmt::format("with {} the program fails, and not for want of memory: {}",
                              cases[i].first.empty() ? "a run" : describe(cases[i].first), experiments[i].why),
                  "oomdiag run shows all that it says");
    }
    runs.push_back({.values = cases[i].first,
                    .memory_bytes = cases[i].second,
                    .experiment = std::move(experiments[i]),
                    .learns = purpose == Purpose::learn});
    runs.back().experiment.report.reset();
    std::optional<AllocationSequence> allocations = std::exchange(runs.back().experiment.allocations, std::nullopt);
    runs_.push_back(runs.back());  // what is remembered needs no allocations
    runs.back().experiment.allocations = std::move(allocations);
  }
  return runs;
}

int Fitter::at_once() const { return request_.device.is_virtual() ? std::max(1, programs_at_once(0)) : 1; }

namespace {

Point point_of(const Experiment& experiment) {
  return {.passes = experiment.passed(),
          .allocated_bytes = experiment.allocated_bytes,
          .needed_bytes = experiment.needed_bytes,
          .available_bytes = experiment.available_bytes(experiment.total_bytes)};
}

/// Runs on this GPU, and those on the largest one that reserved no more than this one has: such a run passes here too.
void take_earlier(BorderSearch& search, const Fitter& fitter, const Variable& variable, const Values& others) {
  for (const FitRun& run : fitter.runs()) {
    const auto value = run.values.find(variable.name);
    if (value == run.values.end()) continue;
    const int64_t position = variable.position_of(static_cast<double>(value->second));
    Values values = others;
    values[variable.name] = variable.value(position);
    if (run.values != values) continue;
    Point point = point_of(run.experiment);
    const int64_t available = run.experiment.available_bytes(fitter.gpu_bytes());
    if (run.learns && point.needed_bytes > available) continue;
    if (run.learns) point.available_bytes = available;
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

}  // namespace

// Where the run passes with headroom, it mostly needs at least what it allocated and at most what it reserved, beside
// what others hold. In between the allocator gives cached segments back and tries again; its
// algorithm is run on what the program asked for (fit_function.h), and the border proved by two runs. Where little is free,
// libraries choose other algorithms, which may take more or less than that: then only runs can show it.
SmallestGpu find_smallest_gpu(Fitter& fitter, const Values& values) {
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
      return run.memory_bytes == bytes && run.values == values;
    });
    const bool passed = known != fitter.runs().end() ? known->experiment.passed() : try_values({bytes}).front();
    if (passed) gpu.bytes = bytes;
    below = passed ? 1 : below + 1;
  }
  return with_place(gpu, fitter, values);
}

}  // namespace oomdiag
