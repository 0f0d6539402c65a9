#include "profiler/shape_function/shape_function.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "profiler/match.h"
#include "profiler/trace/mix.h"

// One program with two batch sizes does the same things in the same order, save where a library takes another way for a larger
// shape: a convolution gets a workspace that it did not have, a reduction a second stage. So sequences are aligned by place, and
// each allocation of a run is looked up in all others: its sizes there are what its rule must give.
//
//   batch 4     conv a 64   conv b 128                relu c 64      free a …
//   batch 16    conv a 256  conv b 512  workspace w   relu c 256     free w, a …
//
// Rules: a = c = 16 ∙ batch, b = 32 ∙ batch, and of w one size is known. A point near 16 has a w of about that size, and that is
// said; one near 4 has none. Between them lies a breakpoint.

namespace oomdiag {
namespace {

/// The places in order, as match() takes them.
std::vector<uint64_t> keys_of(const AllocationSequence& sequence) {
  std::vector<uint64_t> keys;
  for (const auto& allocation : sequence.allocations) keys.push_back(mix(allocation.place, allocation.group));
  return keys;
}

uint64_t structure_of(const AllocationSequence& sequence, const std::vector<uint64_t>& keys) {
  uint64_t hash = 0;
  for (const auto& item : sequence.items)
    hash = mix(hash, (uint64_t{item.allocation} << 3) + static_cast<uint64_t>(item.kind));
  for (const uint64_t key : keys) hash = mix(hash, key);
  return hash;
}

double distance(const ShapePoint& a, const ShapePoint& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d)
    sum += std::fabs(std::log(static_cast<double>(a[d]) / static_cast<double>(b[d])));
  return sum;
}

}  // namespace

// In one dimension along the line through the two nearest runs; in several, that of the nearest one.
int64_t SizeRule::at(const ShapePoint& point) const {
  if (exact) return polynomial.at(point);
  std::vector<size_t> order(points.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return distance(points[i], point); });
  const size_t nearest = order.front();
  if (point.size() != 1) return sizes[nearest];
  const auto x = static_cast<double>(points[nearest][0]), y = static_cast<double>(sizes[nearest]);
  const double slope =
      order.size() == 1 ? y / x
                        : (static_cast<double>(sizes[order[1]]) - y) / (static_cast<double>(points[order[1]][0]) - x);
  return std::max<int64_t>(0, std::llround(y + slope * (static_cast<double>(point[0]) - x)));
}

ShapeFunction ShapeFunction::learn(std::vector<ShapeSample> samples) {
  ShapeFunction function;
  size_t steps = ~size_t{0};
  bool all_ended = true;
  for (const ShapeSample& sample : samples) {
    if (!sample.sequence.unusable.empty()) function.unknown_ = sample.sequence.unusable;
    steps = std::min(steps, sample.sequence.step_ends.size());
    all_ended = all_ended && sample.sequence.ended;
  }
  const bool same_steps =
      std::ranges::all_of(samples, [&](const ShapeSample& s) { return s.sequence.step_ends.size() == steps; });
  if (samples.empty()) function.unknown_ = "nothing was run";
  if (steps == 0 && !all_ended) function.unknown_ = "it makes no steps";
  if (!function.unknown_.empty()) return function;
  for (ShapeSample& sample : samples) {
    if (!all_ended || !same_steps) sample.sequence.cut(steps);
    Template one{.point = sample.point, .sequence = std::move(sample.sequence)};
    one.structure = structure_of(one.sequence, keys_of(one.sequence));
    function.templates_.push_back(std::move(one));
  }
  function.find_rules();
  return function;
}

void ShapeFunction::find_rules() {
  std::vector<std::vector<uint64_t>> keys;
  for (const Template& one : templates_) keys.push_back(keys_of(one.sequence));
  std::map<std::vector<int64_t>, uint32_t> known;  // by the sizes in all runs, -1 where there is none
  for (size_t t = 0; t < templates_.size(); ++t) {
    std::vector<std::vector<uint32_t>> matches(templates_.size());
    for (size_t other = 0; other < templates_.size(); ++other) {
      if (templates_[other].structure != templates_[t].structure) matches[other] = match(keys[t], keys[other]);
    }
    Template& one = templates_[t];
    for (size_t a = 0; a < one.sequence.allocations.size(); ++a) {
      std::vector<int64_t> sizes;
      for (size_t other = 0; other < templates_.size(); ++other) {
        const uint32_t same = matches[other].empty() ? static_cast<uint32_t>(a) : matches[other][a];
        sizes.push_back(same == kUnmatched ? -1 : templates_[other].sequence.allocations[same].requested_bytes);
      }
      const auto [entry, is_new] = known.try_emplace(sizes, static_cast<uint32_t>(rules_.size()));
      if (is_new) {
        SizeRule seen;
        for (size_t other = 0; other < templates_.size(); ++other) {
          if (sizes[other] < 0) continue;
          seen.points.push_back(templates_[other].point);
          seen.sizes.push_back(sizes[other]);
        }
        rule_of(seen);
      }
      one.rules.push_back(entry->second);
    }
  }
}

uint32_t ShapeFunction::rule_of(const SizeRule& samples) {
  SizeRule rule = samples;
  std::optional<Polynomial> found = fit_polynomial(rule.points, rule.sizes);
  if (!found && samples.points.front().empty()) found = Polynomial{{{static_cast<double>(samples.sizes.front()), {}}}};
  rule.exact = found.has_value();
  if (found) rule.polynomial = *found;
  rules_.push_back(std::move(rule));
  return static_cast<uint32_t>(rules_.size() - 1);
}

const ShapeFunction::Template& ShapeFunction::nearest(const ShapePoint& point) const {
  return *std::ranges::min_element(templates_, {}, [&](const Template& one) { return distance(one.point, point); });
}

bool ShapeFunction::has_one_structure() const {
  return std::ranges::all_of(templates_,
                             [&](const Template& one) { return one.structure == templates_.front().structure; });
}

// The second nearest on the other side of the point, or, beyond all runs, the next one, must have done the same.
bool ShapeFunction::is_within_structure(const ShapePoint& point) const {
  if (templates_.size() == 1) return point == templates_.front().point;
  const Template& near = nearest(point);
  if (near.point == point) return true;
  const Template* second = nullptr;
  for (const Template& one : templates_) {
    if (&one == &near) continue;
    const bool is_between =
        distance(one.point, point) + distance(point, near.point) <= distance(one.point, near.point) * 1.0001;
    const bool better = second == nullptr || distance(one.point, point) < distance(second->point, point);
    if (is_between && better) second = &one;
  }
  if (second == nullptr) return has_one_structure();
  return second->structure == near.structure;
}

}  // namespace oomdiag
