#include "profiler/shape_function/shape_function.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "profiler/match.h"
#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/merge_sequences.h"
#include "profiler/shape_function/op_calls.h"
#include "profiler/shape_function/polynomial.h"
#include "profiler/shape_function/single_call.h"
#include "profiler/trace/mix.h"

// One program with two batch sizes does the same things in the same order, save where a library takes another way for a larger
// shape: a convolution gets a workspace that it did not have, a reduction a second stage. So sequences are aligned by place, and
// each allocation of a run is looked up in all others: its sizes there are what its rule must give.
//
//   batch 4     conv a 64   conv b 128                relu c 64      free a …
//   batch 16    conv a 256  conv b 512  workspace w   relu c 256     free w, a …
//
// Rules: a = c = 16 ∙ batch, b = 32 ∙ batch, and of w two sizes are known, 0 and that of batch 16. At a point between them it may
// have any size up to that, and more; that matters where the peak would be another one, and is said there.

namespace oomdiag {
namespace {

/// The places in order, as match() takes them.
std::vector<uint64_t> keys_of(const AllocationSequence& sequence) {
  std::vector<uint64_t> keys;
  for (const auto& allocation : sequence.allocations) keys.push_back(mix(allocation.place, allocation.group));
  return keys;
}

double distance(const ShapePoint& a, const ShapePoint& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d)
    sum += std::fabs(std::log(static_cast<double>(a[d]) / static_cast<double>(b[d])));
  return sum;
}

/// What sizes mostly go with.
double product_of_dimensions(const ShapePoint& point) {
  double product = 1;
  for (const int64_t value : point) product *= static_cast<double>(value);
  return product;
}

}  // namespace

// Along the line through the two nearest runs, over the product of the dimensions.
SizeEstimate SizeRule::at(const ShapePoint& point) const {
  constexpr double kMargin = 2;  ///< a library may choose otherwise between two runs than at both
  const auto exactly = [](int64_t bytes) { return SizeEstimate{bytes, bytes, bytes}; };
  const auto seen = std::ranges::find(points, point);
  if (seen != points.end()) return exactly(sizes[static_cast<size_t>(seen - points.begin())]);
  if (exact) return exactly(polynomial.at(point));
  std::vector<size_t> order(points.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return distance(points[i], point); });
  const double x = product_of_dimensions(point), x1 = product_of_dimensions(points[order[0]]);
  const auto y1 = static_cast<double>(sizes[order[0]]);
  double y = y1;
  if (order.size() > 1) {
    const double x2 = product_of_dimensions(points[order[1]]);
    const auto y2 = static_cast<double>(sizes[order[1]]);
    if (x2 != x1 && y1 > 0 && y2 > 0) y += (y2 - y1) / (x2 - x1) * (x - x1);
  } else {
    y *= x / x1;
  }
  SizeEstimate estimate{.bytes = std::max<int64_t>(0, std::llround(y))};
  double least = y, most = y;
  for (size_t i = 0; i < points.size(); ++i) {
    const double ratio = x / product_of_dimensions(points[i]);
    const auto size = static_cast<double>(sizes[i]);
    least = std::min(least, size * std::min(1.0, ratio));
    most = std::max(most, size * std::max(1.0, ratio));
  }
  estimate.least = is_temporary ? 0 : std::max<int64_t>(0, std::llround(least / kMargin));
  estimate.most = std::max(estimate.least + 1, static_cast<int64_t>(std::llround(most * kMargin)));
  return estimate;
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
  if (steps == 0 && (!all_ended || !same_steps)) function.unknown_ = "it makes no steps";
  if (!function.unknown_.empty()) return function;
  std::vector<MergedSequence> merged;
  for (ShapeSample& sample : samples) {
    if (!all_ended || !same_steps) sample.sequence.cut(steps);
    size_t s = 0;
    while (s < merged.size() && !merge(merged[s], sample.sequence)) ++s;
    if (s == merged.size()) {
      merged.push_back(start_merge(std::move(sample.sequence)));
      function.structures_.emplace_back();
    }
    function.structures_[s].points.push_back(sample.point);
  }
  function.find_rules(merged);
  for (size_t s = 0; s < merged.size(); ++s) {
    function.find_single_calls(merged[s], function.structures_[s]);
    function.structures_[s].sequence = std::move(merged[s].sequence);
  }
  return function;
}

void ShapeFunction::find_rules(const std::vector<MergedSequence>& merged) {
  std::vector<std::vector<uint64_t>> keys;
  for (const MergedSequence& one : merged) keys.push_back(keys_of(one.sequence));
  std::map<std::pair<bool, std::vector<int64_t>>, uint32_t>
      known;  // by the sizes in all runs, -1 where it is not known which it is
  for (size_t s = 0; s < merged.size(); ++s) {
    std::vector<std::vector<uint32_t>> matches(merged.size());
    for (size_t other = 0; other < merged.size(); ++other) {
      if (other != s) matches[other] = match(keys[s], keys[other]);
    }
    for (size_t a = 0; a < merged[s].sequence.allocations.size(); ++a) {
      SizeRule rule{.is_temporary = merged[s].sequence.allocations[a].is_temporary};
      std::vector<int64_t> all;
      for (size_t other = 0; other < merged.size(); ++other) {
        const auto same = other == s ? static_cast<uint32_t>(a) : matches[other][a];
        for (size_t run = 0; run < merged[other].sizes.size(); ++run) {
          all.push_back(same == kUnmatched ? -1 : merged[other].sizes[run][same]);
          if (all.back() < 0) continue;
          rule.points.push_back(structures_[other].points[run]);
          rule.sizes.push_back(all.back());
        }
      }
      const auto [entry, is_new] = known.try_emplace({rule.is_temporary, all}, static_cast<uint32_t>(rules_.size()));
      if (is_new) add_rule(std::move(rule));
      structures_[s].rules.push_back(entry->second);
    }
  }
}

uint32_t ShapeFunction::add_rule(SizeRule rule) {
  std::optional<Polynomial> found = fit_polynomial(rule.points, rule.sizes);
  if (!found && rule.points.front().empty()) found = Polynomial{{{static_cast<double>(rule.sizes.front()), {}}}};
  rule.exact = found.has_value();
  if (found) rule.polynomial = *found;
  rules_.push_back(std::move(rule));
  return static_cast<uint32_t>(rules_.size() - 1);
}

std::optional<std::string> ShapeFunction::text_of(const SingleCall& call, const ShapePoint& point) const {
  return call.text_at(point, [&](uint32_t rule) {
    const SizeEstimate size = rules_[rule].at(point);
    return size.is_exact() ? std::optional(size.bytes) : std::nullopt;
  });
}

// Calls of one text and of the same sizes in all runs are one. Allocations of unknown size get rules of their own by call, as two
// that were equal in all runs may differ elsewhere.
void ShapeFunction::find_single_calls(const MergedSequence& merged, Structure& structure) {
  structure.call_of.assign(structure.rules.size(), OpCalls::kNone);
  std::map<std::string, uint32_t> known;  // by texts and sizes
  std::vector<EarlierSize> earlier;
  for (const CallInRuns& call : list_calls(merged)) {
    const std::vector<uint32_t>& allocations = call.allocations;
    const auto is_unknown = [&](uint32_t a) { return !rules_[structure.rules[a]].exact; };
    if (std::ranges::none_of(allocations, is_unknown)) continue;
    std::optional<SingleCall> single = find_single_call(merged, structure.points, call, earlier);
    if (!single) continue;
    std::string identity;
    for (size_t run = 0; run < single->points.size(); ++run) {
      identity += text_of(*single, single->points[run]).value_or("");
      identity += fmt::format(" {} ", fmt::join(single->sizes[run], " "));
    }
    const auto [entry, is_new] = known.try_emplace(identity, static_cast<uint32_t>(single_calls_.size()));
    if (is_new) {
      for (size_t i = 0; i < allocations.size(); ++i) {
        const uint32_t a = allocations[i];
        single->may_lack.push_back(!is_unknown(a));
        single->rules.push_back(structure.rules[a]);
        if (!is_unknown(a)) continue;
        single->rules.back() = static_cast<uint32_t>(rules_.size());
        SizeRule own = rules_[structure.rules[a]];
        rules_.push_back(std::move(own));
        earlier.push_back({.rule = single->rules.back()});
        for (const auto& of_run : single->sizes) earlier.back().sizes.push_back(of_run[i]);
      }
      single_calls_.push_back(std::move(*single));
    }
    for (size_t i = 0; i < allocations.size(); ++i) {
      structure.rules[allocations[i]] = single_calls_[entry->second].rules[i];
      structure.call_of[allocations[i]] = static_cast<uint32_t>(structure.calls.size());
    }
    structure.calls.push_back({.single_call = entry->second, .allocations = allocations});
  }
}

std::vector<CallAtPoint> ShapeFunction::list_unknown_calls(std::span<const ShapePoint> points) const {
  std::vector<CallAtPoint> calls;
  std::set<std::pair<uint32_t, ShapePoint>> listed = taken_;
  const auto add = [&](uint32_t call, const ShapePoint& point) {
    const auto text = text_of(single_calls_[call], point);
    if (text && listed.insert({call, point}).second) calls.push_back({.call = call, .point = point, .text = *text});
  };
  for (const ShapePoint& point : points) {
    for (const CallInSequence& call : nearest(point).calls) {
      for (const ShapePoint& of_run : single_calls_[call.single_call].points) add(call.single_call, of_run);
    }
  }
  for (const ShapePoint& point : points) {
    for (const CallInSequence& call : nearest(point).calls) {
      if (single_calls_[call.single_call].state != SingleCall::State::refuted) add(call.single_call, point);
    }
  }
  return calls;
}

const std::vector<int64_t>* ShapeFunction::script_of(const CallInSequence& call, const ShapePoint& point) const {
  const auto& scripts = single_calls_[call.single_call].scripts;
  const auto found = scripts.find(point);
  return found == scripts.end() ? nullptr : &found->second;
}

void ShapeFunction::take(std::span<const CallAtPoint> calls, std::span<const MadeAlone> made) {
  std::map<uint32_t, std::map<ShapePoint, const MadeAlone*>> by_call;
  for (size_t i = 0; i < calls.size(); ++i) {
    by_call[calls[i].call][calls[i].point] = &made[i];
    taken_.insert({calls[i].call, calls[i].point});
  }
  for (auto& [index, at_points] : by_call) {
    SingleCall& call = single_calls_[index];
    if (call.state == SingleCall::State::unproved) {
      std::vector<MadeAlone> in_runs;
      for (const ShapePoint& point : call.points) {
        in_runs.push_back(at_points.contains(point) ? *at_points.at(point) : std::nullopt);
      }
      call.prove(in_runs);
    }
    for (const auto& [point, alone] : at_points) {
      if (call.state == SingleCall::State::proved) take_at_point(call, point, *alone);
    }
  }
}

void ShapeFunction::take_at_point(SingleCall& call, const ShapePoint& point, const MadeAlone& made) {
  if (!made || std::ranges::find(call.points, point) != call.points.end()) return;
  const auto sizes = call.assign(*made);
  if (!sizes && call.has_same_results(*made)) call.scripts[point] = *made;
  if (!sizes) return;
  for (size_t a = 0; a < sizes->size(); ++a) {
    const SizeRule& rule = rules_[call.rules[a]];
    const bool is_other = rule.exact && (*sizes)[a] >= 0 && rule.polynomial.at(point) != (*sizes)[a];
    if (is_other) return;  // what the runs say of its other allocations does not hold here
  }
  for (size_t a = 0; a < sizes->size(); ++a) {
    SizeRule& rule = rules_[call.rules[a]];
    if (rule.exact || std::ranges::find(rule.points, point) != rule.points.end()) continue;
    rule.points.push_back(point);
    rule.sizes.push_back((*sizes)[a]);
  }
}

namespace {

double distance_to(const ShapeFunction::Structure& structure, const ShapePoint& point) {
  double least = INFINITY;
  for (const ShapePoint& own : structure.points) least = std::min(least, distance(own, point));
  return least;
}

}  // namespace

const ShapeFunction::Structure& ShapeFunction::nearest(const ShapePoint& point) const {
  return *std::ranges::min_element(structures_, {}, [&](const Structure& one) { return distance_to(one, point); });
}

bool ShapeFunction::has_new_one(const ShapePoint& point) const {
  size_t d = 0;
  for (const int64_t value : point) {
    const auto has_one = [&](const ShapePoint& of_run) { return of_run[d] == 1; };
    const auto knows_one = [&](const Structure& structure) { return std::ranges::any_of(structure.points, has_one); };
    if (value == 1 && std::ranges::none_of(structures_, knows_one)) return true;
    ++d;
  }
  return false;
}

// The nearest run on the other side of the point, or, beyond all runs, every one, must have done the same.
bool ShapeFunction::is_within_structure(const ShapePoint& point) const {
  if (structures_.size() == 1 && structures_.front().points.size() == 1)
    return point == structures_.front().points.front();
  if (structures_.size() == 1) return true;
  const Structure& near = nearest(point);
  const ShapePoint& run =
      *std::ranges::min_element(near.points, {}, [&](const ShapePoint& own) { return distance(own, point); });
  if (run == point) return true;
  const Structure* beyond = nullptr;
  double least = INFINITY;
  for (const Structure& one : structures_) {
    for (const ShapePoint& own : one.points) {
      const double to_point = distance(own, point);
      const bool is_between = own != run && to_point + distance(point, run) <= distance(own, run) * 1.0001;
      if (!is_between || to_point >= least) continue;
      least = to_point;
      beyond = &one;
    }
  }
  return beyond == &near;
}

}  // namespace oomdiag
