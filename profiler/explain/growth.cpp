#include "profiler/explain/growth.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace oomdiag {
namespace {

// 4 readings are 3 increments. With fewer, a program that fills a queue of two batches looks like a leak.
constexpr size_t kLeastSamples = 4;

/// Whether `levels` rise from the first to the last and do not level off. `levels` has at least kLeastSamples values.
///   falls      at most every tenth increment
///   pace       the second half adds at least half of what the whole would at an even pace
///   lately     the last third adds something
bool keeps_rising(const std::vector<int64_t>& levels) {
  const size_t n = levels.size();
  const int64_t rise = levels.back() - levels.front();
  if (rise <= 0) return false;
  size_t falls = 0;
  for (size_t i = 1; i < n; ++i) falls += levels[i] < levels[i - 1] ? 1 : 0;
  if (falls * 10 > n - 1) return false;
  const size_t half = (n - 1) / 2, late = n - 1 - std::max<size_t>(1, (n - 1) / 3);
  const double even = static_cast<double>(rise) * static_cast<double>(n - 1 - half) / static_cast<double>(n - 1);
  return static_cast<double>(levels.back() - levels[half]) >= even / 2 && levels.back() > levels[late];
}

// A larger batch makes a larger tensor in the variable that held the last one; but then the other places' do so too.
bool is_workload(const PlaceCurve& curve, const std::vector<double>& workload) {
  const double first = static_cast<double>(std::max<int64_t>(1, curve.bytes.front()));
  const double growth = static_cast<double>(curve.bytes.back()) / first - 1;
  return workload.back() / workload.front() - 1 > growth / 4;
}

enum class Shape { steady, more_blocks, larger_block };

Shape shape_of(const PlaceCurve& curve, const std::vector<double>& workload) {
  if (curve.bytes.size() < kLeastSamples || !keeps_rising(curve.bytes)) return Shape::steady;
  if (keeps_rising(curve.blocks)) return Shape::more_blocks;
  return is_workload(curve, workload) ? Shape::steady : Shape::larger_block;
}

int64_t median_increment(const std::vector<int64_t>& levels, const std::vector<uint32_t>& steps) {
  std::vector<int64_t> increments;
  for (size_t i = 1; i < levels.size(); ++i) {
    increments.push_back((levels[i] - levels[i - 1]) / std::max<int64_t>(1, int64_t{steps[i]} - steps[i - 1]));
  }
  const auto middle = increments.begin() + static_cast<std::ptrdiff_t>(increments.size() / 2);
  std::nth_element(increments.begin(), middle, increments.end());
  if (*middle != 0) return *middle;
  const int64_t span = std::max<int64_t>(1, int64_t{steps.back()} - steps.front());
  return (levels.back() - levels.front()) / span;  // it grows every few steps only
}

/// The curves that grow for one reason, summed up.
struct Group {
  GrowthKind kind{};
  std::vector<const PlaceCurve*> curves;
};

Growth describe(const Group& group, const std::vector<uint32_t>& steps) {
  Growth growth{.kind = group.kind, .first_step = steps.front(), .last_step = steps.back()};
  std::vector<int64_t> total(steps.size());
  const PlaceCurve* last = group.curves.front();
  for (const PlaceCurve* curve : group.curves) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += curve->bytes[i];
    if (curve->newest > last->newest) last = curve;
    growth.places.push_back(
        {curve->where, median_increment(curve->bytes, steps), curve->bytes.back(), curve->blocks.back()});
  }
  growth.held = last->where;
  growth.bytes_per_step = median_increment(total, steps);
  growth.grown_bytes = total.back() - total.front();
  growth.place_count = growth.places.size();
  std::stable_sort(growth.places.begin(), growth.places.end(),
                   [](const auto& a, const auto& b) { return a.bytes_per_step > b.bytes_per_step; });
  if (growth.places.size() > kMostGrowingPlaces) growth.places.resize(kMostGrowingPlaces);
  return growth;
}

using Owner = std::tuple<GrowthKind, std::string_view, std::string_view, std::string_view>;

// One graph is one reason, however many ops made it; tensors are told apart by op, module and line.
std::vector<Group> group_curves(const StepCurves& curves) {
  std::vector<const PlaceCurve*> in_graph;
  std::map<Owner, Group> groups;
  for (const PlaceCurve& curve : curves.places) {
    const Shape shape = shape_of(curve, curves.workload);
    if (shape == Shape::steady) continue;
    if (shape == Shape::more_blocks && curve.in_graph) {
      in_graph.push_back(&curve);
      continue;
    }
    const GrowthKind kind = shape == Shape::more_blocks ? GrowthKind::kept_tensors : GrowthKind::growing_buffer;
    Group& group = groups[{kind, curve.where.op, curve.where.module, curve.where.source}];
    group.kind = kind;
    group.curves.push_back(&curve);
  }
  std::vector<Group> result;
  for (auto& [owner, group] : groups) result.push_back(std::move(group));
  const GrowthKind kind = in_graph.size() > 1 ? GrowthKind::retained_graph : GrowthKind::kept_tensors;
  if (!in_graph.empty()) result.push_back({kind, std::move(in_graph)});
  return result;
}

}  // namespace

std::string_view name_of(GrowthKind kind) {
  switch (kind) {
    case GrowthKind::retained_graph:
      return "retained_graph";
    case GrowthKind::kept_tensors:
      return "kept_tensors";
    case GrowthKind::growing_buffer:
      return "growing_buffer";
  }
  return "kept_tensors";
}

std::vector<Growth> find_growth(const StepCurves& curves) {
  std::vector<Growth> growths;
  for (const Group& group : group_curves(curves)) growths.push_back(describe(group, curves.steps));
  std::stable_sort(growths.begin(), growths.end(),
                   [](const Growth& a, const Growth& b) { return a.bytes_per_step > b.bytes_per_step; });
  return growths;
}

int64_t sum_grown(const std::vector<Growth>& growths) {
  int64_t sum = 0;
  for (const Growth& growth : growths) sum += growth.grown_bytes;
  return sum;
}

}  // namespace oomdiag
