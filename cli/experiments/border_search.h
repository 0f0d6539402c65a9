#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace oomdiag {

/// What a run with one value showed.
struct Point {
  bool passes = false;
  int64_t allocated_bytes = 0;  ///< its peak
  int64_t needed_bytes = 0;     ///< what it had reserved at most; where it ran out including the failed request
  int64_t available_bytes = 0;  ///< what PyTorch may take of the GPU
};

/// bytes = fixed + slope ∙ value, from runs that passed.
struct Line {
  double fixed_bytes = 0, slope = 0;

  bool operator==(const Line&) const = default;
};

/// The last of `count` positions whose value is not above `limit`; -1 if none is. `value_of(position)` ascends.
template <class ValueOf>
int64_t find_position(int64_t count, ValueOf value_of, double limit) {
  int64_t low = -1, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (static_cast<double>(value_of(middle)) <= limit ? low : high) = middle;
  }
  return low;
}

/// Finds the largest of ascending values with which a program passes, from few runs. Memory is nearly affine in a batch
/// size, so runs that pass say where the border must be; the border is then run on both sides. It need not be the only one,
/// as libraries choose other workspaces for other shapes: the next eight values above it are run too, and, where runs are
/// left, four well above it.
///
///   while (auto next = search.next(2); !next.empty()) for (i : next) search.take(i, run(values[i]));
class BorderSearch {
 public:
  static constexpr int64_t kNeighbours = 8;

  /// `value_of` gives the value at a position, ascending; `most_runs` bounds what is tried above the border, never the border.
  BorderSearch(int64_t count, std::function<int64_t(int64_t)> value_of, int64_t most_runs,
               std::optional<Line> prior = {});

  /// Up to `at_once` positions to run now; none when the border is found.
  std::vector<int64_t> next(int at_once);
  void take(int64_t position, const Point& point) { points_[position] = point; }

  /// The position of the largest that passes; nullopt if none does.
  std::optional<int64_t> found() const;
  /// Through the first and the largest that passed.
  std::optional<Line> line() const;
  /// A value took less as it grew, as libraries chose other algorithms: one well above the border may pass again.
  bool may_pass_above() const;
  const std::map<int64_t, Point>& points() const { return points_; }

 private:
  std::optional<Line> line_to(int64_t position) const;
  std::optional<int64_t> estimate() const;
  std::optional<int64_t> estimate_below(int64_t fails) const;
  int64_t position_of(double value) const { return find_position(count_, value_of_, value); }
  int64_t first_failure(int64_t above) const;
  std::vector<int64_t> begin(int at_once) const;
  std::vector<int64_t> grow(int64_t passes) const;
  std::vector<int64_t> guess(int64_t passes, int64_t fails);
  std::vector<int64_t> narrow(int64_t passes, int64_t fails, int at_once);
  std::vector<int64_t> prove(int64_t passes, int at_once) const;

  int64_t count_;
  std::function<int64_t(int64_t)> value_of_;
  int64_t most_runs_;
  std::optional<Line> prior_;
  std::map<int64_t, Point> points_;
  int guesses_ = 0;     ///< estimates that were tried below a run that failed
  int64_t stride_ = 1;  ///< of the last step above a run that passes
};

/// What runs at these positions showed, in their order; nullopt ends the search.
using RunPositions = std::function<std::optional<std::vector<Point>>(const std::vector<int64_t>&)>;

/// Runs what the search asks for until it has its border, or `run` ends it.
void run_search(BorderSearch& search, int at_once, const RunPositions& run);

/// Whether runs with these values pass, in their order.
using TryValues = std::function<std::vector<bool>(const std::vector<int64_t>&)>;

/// Two values: one that fails and a larger one that passes.
struct Bracket {
  int64_t fails = 0, passes = 0;

  bool operator==(const Bracket&) const = default;
};

/// Starts with `guess`, of which both ends are tried, and moves it in strides that double until one end fails and the other
/// passes, so also where the guess is far off. Multiples of `step` from `least` to `most`: `most` is taken to pass; where even
/// `least` passes, `fails` is a step below it.
Bracket find_bracket(Bracket guess, int64_t step, int64_t least, int64_t most, const TryValues& experiments);

/// The smallest multiple of `step` above `fails` and not above `passes` that passes, `at_once` values at a time. `passes`
/// is taken to pass and `fails` to fail: neither is tried.
int64_t find_smallest(int64_t fails, int64_t passes, int64_t step, int at_once, const TryValues& experiments);

}  // namespace oomdiag
