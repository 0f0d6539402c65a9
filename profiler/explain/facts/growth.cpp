#include "profiler/explain/facts/growth.h"

#include <algorithm>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "profiler/explain/facts/variable_counts.h"
#include "profiler/fold_indices.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"

namespace oomdiag {
namespace {

// 4 readings are 3 increments. With fewer, a program that fills a queue of two batches looks like a leak.
constexpr size_t kLeastSamples = 4;

using Levels = std::span<const int64_t>;

// How much `levels` rise from the one to the other, in parts of what they would at an even pace.
double pace(Levels levels, size_t from, size_t to) {
  const double even = static_cast<double>(levels.back() - levels.front()) * static_cast<double>(to - from) /
                      static_cast<double>(levels.size() - 1);
  return static_cast<double>(levels[to] - levels[from]) / even;
}

/// Whether `levels` rise from the first to the last and do not level off.
///   rises      at least three: one alone is what another line made anew, such as the optimizer's state by a second step()
///   falls      at most every tenth increment
///   pace       the second half adds at least half of what the whole would at an even pace
///   lately     the last third adds something
bool keeps_rising(Levels levels) {
  const size_t n = levels.size();
  if (n < kLeastSamples || levels.back() <= levels.front()) return false;
  size_t rises = 0, falls = 0;
  for (size_t i = 1; i < n; ++i) {
    rises += levels[i] > levels[i - 1] ? 1 : 0;
    falls += levels[i] < levels[i - 1] ? 1 : 0;
  }
  if (rises < kLeastSamples - 1 || falls * 10 > n - 1) return false;
  const size_t late = n - 1 - std::max<size_t>(1, (n - 1) / 3);
  return pace(levels, (n - 1) / 2, n - 1) >= 0.5 && levels.back() > levels[late];
}

/// Whether `levels`, which keep rising, did so from the beginning.
bool rose_at_once(Levels levels) { return pace(levels, 0, levels.size() / 2) >= 0.5; }

// A larger batch makes a larger tensor in the variable that held the last one; but then the other places' do so too.
bool is_workload(const PlaceCurve& curve, const std::vector<double>& workload) {
  const double first = static_cast<double>(std::max<int64_t>(1, curve.bytes.front()));
  const double growth = static_cast<double>(curve.bytes.back()) / first - 1;
  return workload.back() / workload.front() - 1 > growth / 4;
}

enum class GrowthShape { steady, more_blocks, larger_block };

GrowthShape shape_of(const PlaceCurve& curve, const std::vector<double>& workload) {
  if (!keeps_rising(curve.bytes)) return GrowthShape::steady;
  if (keeps_rising(curve.blocks)) return GrowthShape::more_blocks;
  return is_workload(curve, workload) ? GrowthShape::steady : GrowthShape::larger_block;
}

int64_t median_increment(Levels levels, const std::vector<uint32_t>& steps) {
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

constexpr size_t kNowhere = ~size_t{0};

/// From where in `run_steps` on the number of blocks keeps rising, kNowhere if that is not known. Where the steps that
/// the trace still has show no growth, it may be too slow for them: then it must have begun with the run, as what
/// began late may be a list that is emptied at times.
size_t find_beginning(const PlaceCurve& curve, bool grows) {
  const Levels bytes = curve.run_bytes, blocks = curve.run_blocks;
  const size_t latest = grows && !bytes.empty() ? bytes.size() - 1 : 0;
  for (size_t from = 0; from <= latest; ++from) {
    if (!keeps_rising(bytes.subspan(from)) || !keeps_rising(blocks.subspan(from))) continue;
    if (rose_at_once(bytes.subspan(from)) && rose_at_once(blocks.subspan(from))) return from;
  }
  return kNowhere;
}

/// The curves that grow for one reason.
struct Group {
  GrowthKind kind{};
  std::vector<const PlaceCurve*> curves{};
  size_t beginning = kNowhere;  ///< the earliest of find_beginning
};

void add_curve(Group& group, GrowthKind kind, const PlaceCurve& curve, size_t beginning) {
  group.kind = kind;
  group.curves.push_back(&curve);
  group.beginning = std::min(group.beginning, beginning);
}

Growth describe(const Group& group, const StepCurves& curves) {
  const bool over_run = group.beginning != kNowhere;
  std::vector<uint32_t> steps = curves.steps;
  if (over_run)
    steps.assign(curves.run_steps.begin() + static_cast<std::ptrdiff_t>(group.beginning), curves.run_steps.end());
  Growth growth{.kind = group.kind, .first_step = steps.front(), .last_step = steps.back()};
  std::vector<int64_t> total(steps.size());
  const PlaceCurve* last = group.curves.front();
  for (const PlaceCurve* curve : group.curves) {
    const Levels levels = over_run ? Levels(curve->run_bytes).subspan(group.beginning) : Levels(curve->bytes);
    for (size_t i = 0; i < total.size(); ++i) total[i] += levels[i];
    if (curve->newest > last->newest) last = curve;
    growth.places.push_back({.where = curve->where,
                             .context = curve->context,
                             .bytes_per_step = median_increment(levels, steps),
                             .live_bytes = curve->bytes.back(),
                             .blocks = curve->blocks.back(),
                             .differentiated = curve->differentiated});
  }
  growth.held = last->where;
  growth.bytes_per_step = median_increment(total, steps);
  growth.grown_bytes = total.back() - total.front();
  growth.place_count = growth.places.size();
  std::stable_sort(growth.places.begin(), growth.places.end(),
                   [](const auto& a, const auto& b) { return a.bytes_per_step > b.bytes_per_step; });
  if (growth.places.size() > kMaxGrowingPlaces) growth.places.resize(kMaxGrowingPlaces);
  return growth;
}

using Owner = std::tuple<GrowthKind, std::string_view, std::string, std::string_view>;

// One graph is one reason, however many ops made it; tensors are distinguished by op, module and line, where layers that are
// alike are one.
std::vector<Group> group_curves(const StepCurves& curves, bool may_be_graph) {
  Group in_graph;
  std::map<Owner, Group> groups;
  for (const PlaceCurve& curve : curves.places) {
    GrowthShape shape = shape_of(curve, curves.workload);
    size_t beginning = kNowhere;
    if (shape != GrowthShape::larger_block) beginning = find_beginning(curve, shape == GrowthShape::more_blocks);
    if (beginning != kNowhere) shape = GrowthShape::more_blocks;
    if (shape == GrowthShape::steady) continue;
    const GrowthKind kind = shape == GrowthShape::more_blocks ? GrowthKind::kept_tensors : GrowthKind::growing_buffer;
    const bool kept_by_graph = shape == GrowthShape::more_blocks && curve.in_graph && may_be_graph;
    Group& group =
        kept_by_graph ? in_graph : groups[{kind, curve.where.op, fold_indices(curve.where.module), curve.where.source}];
    add_curve(group, kind, curve, beginning);
  }
  std::vector<Group> result;
  for (auto& [owner, group] : groups) result.push_back(std::move(group));
  if (in_graph.curves.size() > 1) in_graph.kind = GrowthKind::retained_graph;
  if (!in_graph.curves.empty()) result.push_back(std::move(in_graph));
  return result;
}

}  // namespace

std::vector<Growth> find_growth(const StepCurves& curves, bool may_be_graph) {
  std::vector<Growth> growths;
  for (const Group& group : group_curves(curves, may_be_graph)) growths.push_back(describe(group, curves));
  std::stable_sort(growths.begin(), growths.end(),
                   [](const Growth& a, const Growth& b) { return a.bytes_per_step > b.bytes_per_step; });
  return growths;
}

bool Growth::has(const Where& made, uint32_t context) const {
  return std::ranges::any_of(places, [&](const GrowingPlace& place) {
    if (context != 0 && place.context == context) return true;
    return place.where.op == made.op && place.where.source == made.source &&
           fold_indices(place.where.module) == fold_indices(made.module);
  });
}

bool Growth::leads_to_all_steps(int64_t nodes) const {
  const int64_t steps = int64_t{last_step} - first_step;
  int64_t made = 0, fewest = steps;  // a place may have left something in some of the steps only
  for (const GrowingPlace& place : places) {
    const int64_t of_place = place.blocks > 0 ? std::min(place.blocks, steps) : steps;
    made += of_place;
    fewest = std::min(fewest, of_place);
  }
  if (place_count > places.size()) made += fewest * static_cast<int64_t>(place_count - places.size());
  return nodes * 4 >= made * 3;
}

void find_referrers(const std::vector<Referrer>& referrers, std::vector<Growth>& growths, bool are_all) {
  constexpr int64_t kFewestOfSample = 16;
  for (Growth& growth : growths) {
    VariableCounts nodes, tensors;
    int64_t found = 0, blocks = 0;
    for (const Referrer& referrer : referrers) {
      if (referrer.earlier_nodes() > 0) nodes.add(referrer.variable, referrer.nodes);
      if (!growth.has(referrer.made, referrer.context)) continue;
      tensors.add(referrer.variable, 1);
      ++found;
      growth.referred_bytes += referrer.storage_bytes;
    }
    for (const GrowingPlace& place : growth.places) blocks += place.blocks;
    // A name has one tensor: what two steps left it does not keep.
    const bool is_one_of_several = blocks > 1 && tensors.count_of_most() == 1 && !is_container(tensors.most());
    const bool is_sample = !are_all && found >= kFewestOfSample && tensors.count_of_most() * 4 >= found * 3;
    const bool are_enough = found * 2 >= blocks || (is_sample && is_container(tensors.most()));
    const bool are_most = growth.kind == GrowthKind::growing_buffer || (are_enough && !is_one_of_several);
    // A graph is kept by the tensors of it that variables refer to; other growth consists of such tensors itself, and a
    // variable that has those of the last step only does not keep the others. What a container has itself no graph keeps.
    const bool is_graph = growth.kind == GrowthKind::retained_graph && growth.leads_to_all_steps(nodes.count_of_most());
    const bool is_contained = are_most && growth.is_referred() && is_container(tensors.most());
    if (is_graph && !is_contained) growth.referrer = nodes.most();
    // Tensors without a node, as detached losses, keep themselves.
    const bool keeps_only_itself =
        growth.kind == GrowthKind::retained_graph && !growth.is_referred() && !nodes.has(tensors.most());
    if (growth.referrer.empty() && are_most && !keeps_only_itself) growth.referrer = tensors.most();
    // Results that were detached, in attributes of layers, say: the graph that made them is gone.
    const bool is_detached = growth.is_referred() && !growth.referrer.empty() && !nodes.has(growth.referrer);
    if (growth.kind == GrowthKind::retained_graph && is_detached) {
      growth.kind = GrowthKind::kept_tensors;
      growth.held = growth.places.front().where;  // no place keeps those of the others
    }
  }
  // Gradients grow as their parameters do, and only these have a variable.
  std::stable_sort(growths.begin(), growths.end(), [](const Growth& a, const Growth& b) {
    return std::pair(a.bytes_per_step, !a.referrer.empty()) > std::pair(b.bytes_per_step, !b.referrer.empty());
  });
}

namespace {

int64_t sum_of(const std::vector<Growth>& growths, int64_t Growth::*bytes) {
  int64_t sum = 0;
  for (const Growth& growth : growths) sum += growth.*bytes;
  return sum;
}

}  // namespace

int64_t sum_grown(const std::vector<Growth>& growths) { return sum_of(growths, &Growth::grown_bytes); }
int64_t sum_per_step(const std::vector<Growth>& growths) { return sum_of(growths, &Growth::bytes_per_step); }

}  // namespace oomdiag
