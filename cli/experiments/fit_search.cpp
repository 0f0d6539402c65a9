#include <fmt/format.h>

#include <algorithm>

#include "cli/experiments/fit.h"
#include "cli/process/workers.h"
#include "profiler/error.h"
#include "profiler/replay/rounding.h"
#include "profiler/report/whole_run.h"

// Each run is a whole run of the program on a virtual card. The driver gives memory in pages of 2 MiB, so that is how exact
// the smallest card can be.

namespace oomdiag {
namespace {

constexpr int64_t kPageBytes = kRoundLargeBytes;
constexpr int64_t kLeastCard = 256 * kMiB, kLargestCard = int64_t{16} << 40;
constexpr int64_t kPagesBelow = 4;  ///< that are tried below the smallest card

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
  std::vector<TrialRequest> requests;
  for (const auto& [values, memory_bytes] : cases) {
    TrialRequest& request = requests.emplace_back(TrialRequest{
        .program = fill_in(request_.program, values), .device = request_.device, .steady = {.steps = request_.steps}});
    auto* const host = std::get_if<VirtualHost>(&request.device.device);
    if (memory_bytes > 0 && host != nullptr) host->memory_bytes = memory_bytes;
  }
  std::vector<Trial> trials;
  try {
    trials = trials_.run(requests, tell_);
  } catch (const Interrupted&) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const std::optional<Trial>& trial = trials_.finished()[i];
      if (trial) runs_.push_back({.values = cases[i].first, .memory_bytes = cases[i].second, .trial = *trial});
    }
    throw;
  }
  std::vector<FitRun> runs;
  for (std::size_t i = 0; i < trials.size(); ++i) {
    if (!trials[i].passed() && !trials[i].ran_out()) {
      throw Error(ErrorKind::environment,
                  fmt::format("with {} the program fails, and not for want of memory: {}",
                              cases[i].first.empty() ? "a run" : describe(cases[i].first), trials[i].why),
                  "oomdiag run shows all that it says");
    }
    runs.push_back({.values = cases[i].first, .memory_bytes = cases[i].second, .trial = std::move(trials[i])});
    runs.back().trial.report.reset();
    runs_.push_back(runs.back());
  }
  return runs;
}

int Fitter::at_once() const { return request_.device.is_virtual() ? std::max(1, programs_at_once(0)) : 1; }

LargestValue find_largest_value(Fitter& fitter, const Variable& variable, const Values& others,
                                const std::optional<Line>& prior) {
  BorderSearch search(
      variable.count(), [&](int64_t i) { return variable.value(i); }, fitter.most_runs(), prior);
  const int at_once = fitter.at_once();
  for (auto positions = search.next(at_once); !positions.empty(); positions = search.next(at_once)) {
    std::vector<std::pair<Values, int64_t>> cases;
    for (const int64_t position : positions) {
      cases.emplace_back(others, 0);
      cases.back().first[variable.name] = variable.value(position);
    }
    const std::vector<FitRun> runs = fitter.run(cases);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Trial& trial = runs[i].trial;
      search.take(positions[i], {.passes = trial.passed(),
                                 .allocated_bytes = trial.allocated_bytes,
                                 .needed_bytes = trial.needed_bytes,
                                 .room_bytes = trial.total_bytes - trial.outside_bytes});
    }
  }
  LargestValue largest{.others = others, .line = search.line()};
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

// Where the run passes with room to spare, it mostly needs at least what it allocated and at most what it reserved, beside
// what others hold. In between the allocator gives cached segments back and tries again: only runs can tell. Where little is
// free, libraries choose other algorithms, which may take more or less than that.
SmallestCard find_smallest_card(Fitter& fitter, const Values& values) {
  const int at_once = fitter.at_once();
  const Trial large = fitter.run({{values, kLargestCard}}).front().trial;
  if (!large.passed()) return {.bytes = 0, .outside_bytes = 0, .fails_in = large.place};
  SmallestCard card{.bytes = 0,
                    .outside_bytes = large.outside_bytes,
                    .takes_share = is_share_of_card(large.allocated_bytes, large.total_bytes)};
  const TrialsOf trials = [&](const std::vector<int64_t>& sizes) {
    std::vector<std::pair<Values, int64_t>> cases;
    for (const int64_t bytes : sizes) cases.emplace_back(values, bytes);
    std::vector<bool> passed;
    for (const FitRun& run : fitter.run(cases)) passed.push_back(run.trial.passed());
    return passed;
  };
  const int64_t held = large.outside_bytes + large.allocated_bytes;
  const int64_t passes = std::max(kLeastCard + kPageBytes, large.outside_bytes + large.reserved_bytes + kPageBytes);
  const Bracket around =
      find_bracket({.fails = held - kPageBytes, .passes = passes}, kPageBytes, kLeastCard, kLargestCard, trials);
  card.bytes = find_smallest(around.fails, around.passes, kPageBytes, at_once, trials);
  for (int64_t below = 1; below <= kPagesBelow && card.bytes - below * kPageBytes >= kLeastCard;) {
    const int64_t bytes = card.bytes - below * kPageBytes;
    const auto known = std::find_if(fitter.runs().begin(), fitter.runs().end(), [&](const FitRun& run) {
      return run.memory_bytes == bytes && run.values == values;
    });
    const bool passed = known != fitter.runs().end() ? known->trial.passed() : trials({bytes}).front();
    if (passed) card.bytes = bytes;
    below = passed ? 1 : below + 1;
  }
  for (const FitRun& run : fitter.runs()) {
    if (run.memory_bytes == card.bytes - kPageBytes && run.values == values) card.fails_in = run.trial.place;
  }
  return card;
}

}  // namespace oomdiag
