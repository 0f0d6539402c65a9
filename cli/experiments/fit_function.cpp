#include "cli/experiments/fit_function.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/experiments/fit.h"
#include "profiler/export/surface_picture.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/evaluate.h"
#include "profiler/shape_function/polynomial.h"
#include "profiler/shape_function/shape_function.h"
#include "profiler/shape_function/single_call.h"

// Four runs for one variable: two with small values show about where the border is, and two near it show what libraries
// choose there. All have more memory than they need, so that none is cut short. Then every value is computed in a
// millisecond or so, fragmentation included, and only the border is run. What is computed is never the answer where
// a run says otherwise.

namespace oomdiag {
namespace {

constexpr int64_t kFewValues = 6;  ///< trying them is as good
/// Batches of 1 take ways of their own in many kernels; and sizes that are rounded to multiples of 8 look like products at
/// multiples of 8.
constexpr int64_t kSmall = 3, kSecond = 17;
constexpr double kBelowBorder[] = {1.0, 0.8, 0.9, 0.7};
constexpr int64_t kAbove = 64;  ///< that are computed above the border: fragmentation is not monotone
constexpr double kComputedFarAbove[] = {1.1, 1.2, 1.35, 1.5, 2};  ///< one more than BorderSearch runs: it costs nothing
constexpr int kMaxProofs = 3;
constexpr int kMaxCallRounds = 3;      ///< in which calls are made alone, and what follows from them
constexpr int64_t kLearnedAround = 4;  ///< values on each side of a border whose unknown sizes are asked for
constexpr int64_t kMaxColumns = 12, kMaxRows = 16;  ///< of a picture

/// The values of the other variables in the runs to learn from: smallest, largest, then between and crosswise.
Values others_of_run(std::span<const Variable> others, size_t run) {
  Values values;
  for (size_t d = 0; d < others.size(); ++d) {
    const int64_t last = others[d].count() - 1;
    const int64_t levels[] = {0, last, last - last / 16, last / 16, last / 2, last / 3};
    values[others[d].name] = others[d].value(levels[(run + d * (run / 2)) % 6]);
  }
  return values;
}

double product_of(const Values& values) {
  double product = 1;
  for (const auto& [name, value] : values) product *= static_cast<double>(value);
  return product;
}

/// Where about the border lies, if bytes were fixed + slope ∙ the product of all values.
class BorderGuess {
 public:
  explicit BorderGuess(const std::vector<FitRun>& runs) {
    const double x1 = product_of(runs[0].values), x2 = product_of(runs[1].values);
    const auto y1 = static_cast<double>(runs[0].experiment.allocated_bytes);
    slope_ = (static_cast<double>(runs[1].experiment.allocated_bytes) - y1) / (x2 - x1);
    fixed_ = y1 - slope_ * x1;
    outside_ = static_cast<double>(runs[0].experiment.non_pytorch_bytes);
  }
  /// Infinite where bytes do not grow.
  double value(const Values& others, int64_t gpu_bytes) const {
    const double available = std::max(0.0, static_cast<double>(gpu_bytes) - outside_ - fixed_);
    return slope_ <= 0 ? INFINITY : available / slope_ / product_of(others);
  }

 private:
  double fixed_ = 0, slope_ = 0, outside_ = 0;
};

/// `values` with the variable at the position that is nearest to `position` and not in `taken`.
Values with_position(const Variable& variable, Values values, int64_t position, const std::vector<Values>& taken) {
  position = std::clamp<int64_t>(position, 0, variable.count() - 1);
  for (int64_t step = 0; step < variable.count(); ++step) {
    for (const int64_t near : {position - step, position + step}) {
      if (near < 0 || near >= variable.count()) continue;
      values[variable.name] = variable.value(near);
      if (std::ranges::find(taken, values) == taken.end()) return values;
    }
  }
  return values;
}

}  // namespace

MemoryFunction MemoryFunction::learn(Fitter& fitter, std::span<const Variable> variables) {
  const Variable& first = variables.front();
  std::vector<Variable> others;
  for (const Variable& other : variables.subspan(1)) {
    if (other.count() > 1) others.push_back(other);
  }
  if (fitter.gpu_bytes() == 0) return MemoryFunction("the GPU is a real one");
  if (first.count() <= kFewValues) return MemoryFunction("there are few values");
  if (others.size() > 1) return MemoryFunction("more than two variables vary");
  Values fixed;
  for (const Variable& other : variables.subspan(1)) fixed[other.name] = other.value(0);

  std::vector<Values> points;
  const auto add = [&](size_t run, double value) {
    Values values = fixed;
    for (const auto& [name, other] : others_of_run(others, run)) values[name] = other;
    points.push_back(with_position(first, values, first.position_of(value), points));
  };
  const auto least = static_cast<double>(first.value(0));
  add(0, std::max<double>(least, kSmall));
  add(1, std::max<double>(least * 4, kSecond));
  std::vector<FitRun> runs = fitter.learn(points);
  for (const FitRun& run : runs) {
    if (!run.experiment.passed()) return MemoryFunction("it runs out of memory on any GPU");
  }
  const BorderGuess guess(runs);
  const size_t small = points.size(), all = others.empty() ? 4 : 6;
  for (size_t run = small; run < all; ++run) {
    const Values here = others_of_run(others, run);
    const double border = std::min(guess.value(here, fitter.gpu_bytes()), static_cast<double>(first.most));
    add(run, std::max(border * kBelowBorder[run - small], least));
  }
  const std::vector<FitRun> near = fitter.learn({points.begin() + static_cast<std::ptrdiff_t>(small), points.end()});
  runs.insert(runs.end(), near.begin(), near.end());

  MemoryFunction function;
  function.names_.push_back(first.name);
  for (const Variable& other : others) function.names_.push_back(other.name);
  for (FitRun& run : runs) {
    if (!run.experiment.passed()) return MemoryFunction("it runs out of memory on any GPU");
    function.non_pytorch_bytes_ = std::max(function.non_pytorch_bytes_, run.experiment.non_pytorch_bytes);
    function.samples_.push_back({function.point_of(run.values), std::move(*run.experiment.allocations)});
  }
  function.relearn();
  return function;
}

MemoryFunction MemoryFunction::of_one_run(const Experiment& experiment) {
  if (!experiment.allocations) return MemoryFunction("it was not recorded");
  MemoryFunction function;
  function.non_pytorch_bytes_ = experiment.non_pytorch_bytes;
  function.samples_.push_back({{}, *experiment.allocations});
  function.relearn();
  return function;
}

ShapePoint MemoryFunction::point_of(const Values& values) const {
  ShapePoint point;
  for (const std::string& name : names_) point.push_back(values.at(name));
  return point;
}

void MemoryFunction::relearn() {
  function_ = ShapeFunction::learn(samples_);
  unknown_ = function_.unknown();
}

void MemoryFunction::add(const Values& values, const AllocationSequence& allocations) {
  const ShapePoint point = point_of(values);
  const bool is_there = std::ranges::any_of(samples_, [&](const ShapeSample& sample) { return sample.point == point; });
  const auto releases = [](const AllocationSequence& sequence) {
    return std::ranges::any_of(
        sequence.items, [](const auto& item) { return item.kind == AllocationSequence::ItemKind::release_cached; });
  };
  if (is_there || !allocations.unusable.empty() || releases(samples_.front().sequence)) return;
  samples_.push_back({point, allocations});
  // The program itself releases nothing: it was the allocator, on a full GPU.
  std::erase_if(samples_.back().sequence.items,
                [](const auto& item) { return item.kind == AllocationSequence::ItemKind::release_cached; });
  relearn();
}

int64_t MemoryFunction::available_bytes(int64_t gpu_bytes) const {
  return oomdiag::available_bytes(gpu_bytes, non_pytorch_bytes_, samples_.front().sequence.settings.memory_fraction);
}

void MemoryFunction::learn_calls(Fitter& fitter, std::span<const Values> all) {
  if (!is_known()) return;
  std::vector<ShapePoint> points;
  for (const Values& values : all) points.push_back(point_of(values));
  for (int round = 0; round < kMaxCallRounds; ++round) {
    const std::vector<CallAtPoint> calls = function_.list_unknown_calls(points);
    if (calls.empty()) return;
    std::vector<std::string> texts;
    for (const CallAtPoint& call : calls) texts.push_back(call.text);
    function_.take(calls, fitter.make_alone(texts));
  }
}

ShapeEstimate MemoryFunction::estimate(const Values& values, int64_t gpu_bytes) const {
  return evaluate(function_, point_of(values), available_bytes(gpu_bytes));
}

std::string MemoryFunction::formula(const Values& values) const {
  return to_text(peak_formula(function_, point_of(values)), names_);
}

namespace {

/// The largest position that fits by the function; -1 if none does.
int64_t largest_by_function(const MemoryFunction& function, const Variable& variable, const Values& others,
                            int64_t gpu_bytes) {
  const auto fits = [&](int64_t position) {
    Values values = others;
    values[variable.name] = variable.value(position);
    return function.estimate(values, gpu_bytes).fits;
  };
  int64_t low = -1, high = variable.count();
  for (bool moved = true; moved;) {
    while (high - low > 1) {
      const int64_t middle = low < 0                    ? 0
                             : high == variable.count() ? std::min(high - 1, 2 * low + 1)
                                                        : low + (high - low) / 2;
      (fits(middle) ? low : high) = middle;
    }
    moved = false;
    std::vector<int64_t> above;
    for (int64_t i = 2; i <= kAbove && low >= 0; ++i) above.push_back(low + i);
    for (const double far : kComputedFarAbove)
      above.push_back(low < 0 ? -1 : variable.position_of(far * static_cast<double>(variable.value(low))));
    for (const int64_t position : above) {
      if (position <= low + 1 || position >= variable.count() || !fits(position)) continue;
      low = position;
      high = variable.count();
      moved = true;
    }
  }
  return low;
}

/// What runs with the largest value that fits by the function, and the next one, show.
struct Proof {
  bool holds = true;        ///< the one fits and the other does not
  bool as_computed = true;  ///< … and to the byte
  std::vector<int64_t> failed_above{};
};

bool is_as_estimated(const Experiment& experiment, const ShapeEstimate& estimate) {
  return experiment.passed() == estimate.fits &&
         (!estimate.fits || (experiment.allocated_bytes == estimate.peak_allocated_bytes &&
                             experiment.reserved_bytes == estimate.peak_reserved_bytes));
}

Proof prove_border(Fitter& fitter, const Variable& variable, const std::vector<Values>& around, int64_t position,
                   MemoryFunction& function) {
  Proof proof;
  std::vector<FitRun> runs;
  std::vector<Values> new_ones;
  for (const Values& values : around) {
    const FitRun* const known = fitter.find_on_gpu(values);
    if (known == nullptr) {
      new_ones.push_back(values);
    } else {
      runs.push_back(*known);
    }
  }
  std::ranges::move(fitter.prove(new_ones), std::back_inserter(runs));
  for (const FitRun& run : runs) {
    const int64_t value = run.values.at(variable.name);
    const bool is_inside = position >= 0 && value <= variable.value(position);
    const ShapeEstimate estimate = function.estimate(run.values, fitter.gpu_bytes());
    proof.holds = proof.holds && run.experiment.passed() == is_inside;
    proof.as_computed = proof.as_computed && is_as_estimated(run.experiment, estimate);
    if (!is_inside) proof.failed_above.push_back(value);
  }
  for (const FitRun& run : runs) {
    if (run.experiment.allocations) function.add(run.values, *run.experiment.allocations);
  }
  return proof;
}

/// `others` with the values of the variable at these positions, as far as there are any.
std::vector<Values> values_between(const Variable& variable, const Values& others, int64_t first, int64_t last) {
  std::vector<Values> all;
  for (int64_t i = std::max<int64_t>(0, first); i <= std::min(last, variable.count() - 1); ++i) {
    all.push_back(others);
    all.back()[variable.name] = variable.value(i);
  }
  return all;
}

/// The largest position that fits by the function, which then knows the sizes around it.
int64_t find_known_border(Fitter& fitter, const Variable& variable, const Values& others, MemoryFunction& function) {
  const int64_t gpu = fitter.gpu_bytes();
  int64_t position = largest_by_function(function, variable, others, gpu);
  for (int round = 0; round < kMaxCallRounds; ++round) {
    const auto is_exact = [&](const Values& values) { return function.estimate(values, gpu).is_exact(); };
    if (std::ranges::all_of(values_between(variable, others, position, position + 1), is_exact)) break;
    function.learn_calls(fitter,
                         values_between(variable, others, position - kLearnedAround, position + kLearnedAround));
    const int64_t before = std::exchange(position, largest_by_function(function, variable, others, gpu));
    if (before == position) break;
  }
  return position;
}

}  // namespace

std::optional<int64_t> compute_largest(const MemoryFunction& function, const Variable& variable, const Values& others,
                                       int64_t gpu_bytes) {
  const int64_t position = largest_by_function(function, variable, others, gpu_bytes);
  return position < 0 ? std::nullopt : std::optional(variable.value(position));
}

std::optional<LargestValue> find_largest_by_function(Fitter& fitter, const Variable& variable, const Values& others,
                                                     MemoryFunction& function, bool may_believe) {
  for (int proof = 0; proof < kMaxProofs && function.is_known(); ++proof) {
    const int64_t gpu = fitter.gpu_bytes();
    const int64_t position = find_known_border(fitter, variable, others, function);
    const std::vector<Values> around = values_between(variable, others, position, position + 1);
    LargestValue largest{.others = others};
    const bool believes =
        may_believe && function.is_confirmed() &&
        std::ranges::all_of(around, [&](const Values& values) { return function.estimate(values, gpu).is_exact(); });
    if (!believes) {
      const Proof proof_of_border = prove_border(fitter, variable, around, position, function);
      if (!proof_of_border.holds) continue;
      largest.as_computed = proof_of_border.as_computed;
      largest.failed_above = proof_of_border.failed_above;
      if (largest.as_computed) function.confirm();
    }
    if (position < 0) return largest;
    largest.value = variable.value(position);
    largest.is_last_of_range = position == variable.count() - 1;
    Values values = others;
    values[variable.name] = *largest.value;
    const ShapeEstimate estimate = function.estimate(values, gpu);
    largest.formula = function.formula(values);
    largest.doubt = estimate.doubt;
    largest.computed_bytes = estimate.peak_allocated_bytes;
    return largest;
  }
  if (function.is_known()) function = MemoryFunction("runs at the computed border show another one");
  return std::nullopt;
}

namespace {

/// At most `count` values up to `most`, evenly spread, with both ends.
std::vector<int64_t> spread_values(const Variable& variable, int64_t most, int64_t count) {
  const int64_t last = variable.position_of(static_cast<double>(most));
  std::vector<int64_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(variable.value(last * i / std::max<int64_t>(1, count - 1)));
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

}  // namespace

Surface compute_surface(MemoryFunction& function, const Variable& x, const Variable& y, Fitter& fitter) {
  const int64_t gpu_bytes = fitter.gpu_bytes();
  Surface surface{.x_name = x.name,
                  .y_name = y.name,
                  .y = spread_values(y, y.most, kMaxRows),
                  .available_bytes = function.available_bytes(gpu_bytes)};
  int64_t largest = x.least;
  for (const int64_t value : surface.y) {
    surface.border.push_back(compute_largest(function, x, {{y.name, value}}, gpu_bytes));
    largest = std::max(largest, surface.border.back().value_or(x.least));
  }
  surface.x = spread_values(x, std::min(x.most, largest + largest / 8 + x.step), kMaxColumns);
  std::vector<Values> grid;
  for (const int64_t row : surface.y) {
    for (const int64_t column : surface.x) grid.push_back({{x.name, column}, {y.name, row}});
  }
  function.learn_calls(fitter, grid);
  for (const Values& values : grid) {
    const ShapeEstimate estimate = function.estimate(values, gpu_bytes);
    surface.peak_bytes.push_back(estimate.peak_allocated_bytes);
    surface.fits.push_back(estimate.fits);
    surface.is_exact.push_back(estimate.is_exact());
  }
  return surface;
}

int64_t find_smallest_gpu_by_function(const MemoryFunction& function, const Values& values, int64_t least, int64_t most,
                                      int64_t page_bytes) {
  const auto fits = [&](int64_t bytes) { return function.estimate(values, bytes).fits; };
  int64_t low = least / page_bytes, high = most / page_bytes;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle * page_bytes) ? high : low) = middle;
  }
  for (int64_t below = 1; below <= kPagesBelow && high - below > least / page_bytes; ++below) {
    if (!fits((high - below) * page_bytes)) continue;
    high -= below;
    below = 0;
  }
  return high * page_bytes;
}

}  // namespace oomdiag
