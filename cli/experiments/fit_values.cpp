#include "cli/experiments/fit_values.h"

#include <algorithm>
#include <span>
#include <variant>
#include <vector>

#include "cli/device/device.h"
#include "cli/device/gpus.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_function.h"
#include "cli/experiments/fit_lengths.h"

namespace oomdiag {

std::vector<Variable> ValueQuestion::learned() const {
  std::vector<Variable> all = variables;
  if (lengths) all.push_back(lengths->variable());
  return all;
}

std::vector<Values> ValueQuestion::borders() const {
  if (only_points) return {};
  if (lengths) return {{{kLength, lengths->distinct.back()}}};
  return combine(std::span(variables).subspan(1));
}

const LargestValue* FitOfGpu::best() const {
  const LargestValue* best = nullptr;
  for (const LargestValue& one : largest) {
    if (one.value && (best == nullptr || *one.value > *best->value)) best = &one;
  }
  return best;
}

FitOfGpu ValueSearch::search(const GpuEntry& gpu) {
  if (auto* const host = std::get_if<VirtualHost>(&request_.device.device))
    host->gpus.assign(static_cast<std::size_t>(request_.count), gpu);
  const std::size_t before = runs_.size();
  Fitter fitter(request_, experiments_, [&](std::size_t runs) { on_done_(before + runs); });
  FitOfGpu found{.gpu = gpu.id, .largest = {}, .runs = {}};
  const auto keep_runs = [&] { runs_.insert(runs_.end(), fitter.runs().begin(), fitter.runs().end()); };
  try {
    answer(fitter, found);
  } catch (...) {
    keep_runs();
    throw;
  }
  keep_runs();
  found.runs = fitter.runs();
  found.calls_alone = fitter.calls_alone();
  return found;
}

/// With the first of them run on to the program's end.
MemoryFunction ValueSearch::find_borders(Fitter& fitter, FitOfGpu& found) {
  const Variable& searched = question_.variables.front();
  for (;;) {
    MemoryFunction function = MemoryFunction::learn(fitter, question_.learned());
    found.largest.clear();
    for (const Values& others : question_.borders()) {
      found.largest.push_back(
          find_largest_value(fitter, searched, others, lines_[others], function, /*may_believe=*/true));
      lines_[others] = found.largest.back().line;
    }
    const auto first = std::ranges::find_if(found.largest, [](const auto& one) { return one.value.has_value(); });
    if (first == found.largest.end()) return function;
    Values values = first->others;
    values[searched.name] = *first->value;
    if (fitter.holds_to_end(values, 0)) return function;
  }
}

void ValueSearch::answer(Fitter& fitter, FitOfGpu& found) {
  const Variable& searched = question_.variables.front();
  const std::vector<Variable> learned = question_.learned();
  MemoryFunction function = find_borders(fitter, found);
  if (question_.lengths) found.budget = find_token_budget(fitter, searched, *question_.lengths, function);
  if (!function.is_known()) {
    if (!question_.points.empty()) found.unknown = function.unknown();
    return;
  }
  if (question_.wants_surface && learned.size() == 2 && learned.back().count() > 1)
    found.surface = compute_surface(function, searched, learned.back(), fitter);
  function.learn_calls(fitter, question_.points);
  for (const Values& point : question_.points)
    found.computed.emplace_back(point, function.estimate(point, fitter.gpu_bytes()));
}

}  // namespace oomdiag
