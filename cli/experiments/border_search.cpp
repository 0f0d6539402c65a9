#include "cli/experiments/border_search.h"

#include <algorithm>
#include <cmath>
#include <ranges>

namespace oomdiag {
namespace {

constexpr int64_t kProbe = 16;                         ///< the second value, in multiples of the first
constexpr int kMaxGuesses = 5;                         ///< then halving: the border is not where the bytes say
constexpr double kOther = 1.1;                         ///< times a slope is another slope
constexpr double kFarAbove[] = {1.1, 1.2, 1.35, 1.5};  ///< of the border, tried where runs are left

}  // namespace

BorderSearch::BorderSearch(int64_t count, std::function<int64_t(int64_t)> value_of, int64_t most_runs,
                           std::optional<Line> prior)
    : count_(count), value_of_(std::move(value_of)), most_runs_(most_runs), prior_(prior) {}

std::optional<int64_t> BorderSearch::found() const {
  for (const auto& [position, point] : std::views::reverse(points_)) {
    if (point.passes) return position;
  }
  return std::nullopt;
}

// From the first on, not between the largest two: these show a choice of other workspaces rather than a slope.
std::optional<Line> BorderSearch::line() const {
  const std::optional<int64_t> largest = found();
  return largest && *largest > points_.begin()->first ? line_to(*largest) : prior_;
}

std::optional<Line> BorderSearch::line_to(int64_t position) const {
  const Point &first = points_.begin()->second, &last = points_.at(position);
  const auto x1 = static_cast<double>(value_of_(points_.begin()->first)), x2 = static_cast<double>(value_of_(position));
  const auto y1 = static_cast<double>(first.allocated_bytes), y2 = static_cast<double>(last.allocated_bytes);
  if (y2 <= y1) return std::nullopt;
  const double slope = (y2 - y1) / (x2 - x1);
  return Line{.fixed_bytes = y2 - slope * x2, .slope = slope};
}

bool BorderSearch::may_pass_above() const {
  const std::optional<int64_t> largest = found();
  const std::optional<Line> now = line();
  if (!largest || !now || *largest == count_ - 1) return false;
  const int64_t value = value_of_(*largest);
  const bool was_tried =
      static_cast<double>(value_of_(points_.rbegin()->first)) > kFarAbove[2] * static_cast<double>(value);
  return !was_tried && std::ranges::any_of(points_, [&](const auto& one) {
    const int64_t other = value_of_(one.first);
    if (!one.second.passes || one.first == points_.begin()->first || other < value / 8 || other > value / 2)
      return false;
    const std::optional<Line> then = line_to(one.first);
    return then && then->slope > kOther * now->slope;
  });
}

/// Where the line reaches the available memory.
std::optional<int64_t> BorderSearch::estimate() const {
  const std::optional<Line> along = line();
  if (!along || points_.empty()) return std::nullopt;
  int64_t available = 0;
  for (const auto& [position, point] : points_) available = std::max(available, point.available_bytes);
  return position_of((static_cast<double>(available) - along->fixed_bytes) / along->slope);
}

int64_t BorderSearch::first_failure(int64_t above) const {
  for (auto point = points_.upper_bound(above); point != points_.end(); ++point) {
    if (!point->second.passes) return point->first;
  }
  return count_;
}

std::vector<int64_t> BorderSearch::begin(int at_once) const {
  std::vector<int64_t> positions{0};
  const int64_t probe = position_of(static_cast<double>(value_of_(0)) * kProbe);
  if (at_once > 1 && probe > 0) positions.push_back(probe);
  return positions;
}

/// Where one that failed would not have, had it requested less by what was missing. Too high where it failed early in a
/// step.
std::optional<int64_t> BorderSearch::estimate_below(int64_t fails) const {
  const auto point = points_.find(fails);
  if (point == points_.end() || point->second.needed_bytes <= point->second.available_bytes) return std::nullopt;
  const auto needed = static_cast<double>(point->second.needed_bytes);
  const auto value = static_cast<double>(value_of_(fails));
  const double missing = needed - static_cast<double>(point->second.available_bytes);
  const std::optional<Line> along = line();
  return position_of(value - missing / (along ? along->slope : needed / value));
}

/// Above one that passes, where nothing has failed yet.
std::vector<int64_t> BorderSearch::grow(int64_t passes) const {
  const std::optional<int64_t> border = estimate();
  if (!border) return {position_of(static_cast<double>(value_of_(passes)) * kProbe)};
  if (points_.size() > 2 || *border >= count_ - 1) return {*border, *border + 1};
  return {*border - (*border - passes) / 10,
          *border - (*border - passes) / 5};  // fragmentation takes its part, mostly a tenth
}

/// Between one that passes and one that fails.
std::vector<int64_t> BorderSearch::guess(int64_t passes, int64_t fails) {
  const std::optional<int64_t> border = estimate_below(fails);
  if (!border || guesses_++ >= kMaxGuesses) return {};
  if (*border <= passes) {  // it was too low: on in growing steps
    stride_ *= 2;
    return {passes + stride_ / 2, passes + stride_};
  }
  const int64_t beyond = *border - (fails - *border);
  const bool too_high = guesses_ > 1 && beyond > passes;  // as the last one was
  return {*border, too_high ? beyond : *border + 1};
}

std::vector<int64_t> BorderSearch::narrow(int64_t passes, int64_t fails, int at_once) {
  std::vector<int64_t> positions;
  const auto add = [&](int64_t position) {
    position = std::clamp(position, passes + 1, fails - 1);
    const bool is_new =
        !points_.contains(position) && std::find(positions.begin(), positions.end(), position) == positions.end();
    if (is_new && static_cast<int>(positions.size()) < at_once) positions.push_back(position);
  };
  for (const int64_t position : fails == count_ ? grow(passes) : guess(passes, fails)) add(position);
  if (positions.empty()) {
    const int64_t ways = at_once + 1;
    for (int64_t i = 1; i < ways; ++i) add(passes + (fails - passes) * i / ways);
  }
  return positions;
}

std::vector<int64_t> BorderSearch::prove(int64_t passes, int at_once) const {
  std::vector<int64_t> positions;
  const auto left = most_runs_ - static_cast<int64_t>(points_.size());
  const auto most = std::min<int64_t>(at_once, left);
  const auto add = [&](int64_t position) {
    const bool is_new = position < count_ && !points_.contains(position);
    if (is_new && static_cast<int64_t>(positions.size()) < most) positions.push_back(position);
  };
  for (int64_t i = passes + 1; i <= passes + kNeighbours; ++i) add(i);
  for (const double far : kFarAbove) add(position_of(far * static_cast<double>(value_of_(passes))));
  return positions;
}

std::vector<int64_t> BorderSearch::next(int at_once) {
  const std::optional<int64_t> passes = found();
  if (!passes) {
    if (points_.contains(0)) return {};  // the least fails
    if (points_.empty() && prior_) {  // another GPU has shown the line; its available memory is not known before a run
      return {0};
    }
    return begin(points_.empty() ? at_once : 1);
  }
  const int64_t fails = first_failure(*passes);
  if (fails - *passes > 1 && *passes + 1 < count_) return narrow(*passes, fails, at_once);
  return prove(*passes, at_once);
}

void run_search(BorderSearch& search, int at_once, const RunPositions& run) {
  for (auto positions = search.next(at_once); !positions.empty(); positions = search.next(at_once)) {
    const std::optional<std::vector<Point>> points = run(positions);
    if (!points) return;
    for (std::size_t i = 0; i < positions.size(); ++i) search.take(positions[i], (*points)[i]);
  }
}

Bracket find_bracket(Bracket guess, int64_t step, int64_t least, int64_t most, const TryValues& experiments) {
  guess.fails = std::max(guess.fails, least);
  const std::vector<bool> ends = experiments({guess.fails, guess.passes});
  bool fails = !ends[0], passes = ends[1];
  for (int64_t stride = std::max(step, guess.passes / 16); !passes; stride *= 2) {
    guess = {.fails = guess.passes, .passes = std::min(most, guess.passes + stride)};
    passes = guess.passes == most || experiments({guess.passes}).front();
    fails = true;
  }
  for (int64_t stride = std::max(step, guess.fails / 16); !fails; stride *= 2) {
    guess.passes = guess.fails;
    if (guess.fails == least) return {.fails = least - step, .passes = least};
    guess.fails = std::max(least, guess.fails - stride);
    fails = !experiments({guess.fails}).front();
  }
  return guess;
}

int64_t find_smallest(int64_t fails, int64_t passes, int64_t step, int at_once, const TryValues& experiments) {
  int64_t low = fails / step, high = (passes + step - 1) / step;
  while (high - low > 1) {
    std::vector<int64_t> values;
    const int64_t ways = std::min<int64_t>(at_once + 1, high - low);
    for (int64_t i = 1; i < ways; ++i) values.push_back((low + (high - low) * i / ways) * step);
    const std::vector<bool> passed = experiments(values);
    for (std::size_t i = 0; i < values.size(); ++i) {  // the lowest that passes is the next upper end
      const int64_t at = values[i] / step;
      if (passed[i]) {
        high = at;
        break;
      }
      low = at;
    }
  }
  return high * step;
}

}  // namespace oomdiag
