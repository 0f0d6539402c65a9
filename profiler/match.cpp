#include "profiler/match.h"

#include <algorithm>
#include <utility>

// Myers' O(ND) algorithm (Algorithmica 1, 1986), in two forms. Search keeps each round, so that it can go back from wherever one of the
// sequences ends. Halves, for sequences that may differ nearly everywhere, as those of two batch sizes do, searches from both ends, divides
// the sequences where the two searches meet, and goes on in the halves: it keeps one round (section 4b there). Where the searches have not
// met after kMostRounds it divides where one of them has come farthest.
//
// `reached[k]`: how far along diagonal k, left - right, the paths with d differences get.

namespace oomdiag {
namespace {

using Reached = std::vector<int64_t>;

struct Search {
  std::span<const uint64_t> left, right;
  std::vector<Reached>
      rounds{};  ///< of each number of differences: what was reached before it, from diagonal -d - 1 on

  int64_t left_end = 0, right_end = 0;  ///< where the search ended

  int64_t run_on(int64_t x, int64_t k) const {
    const auto n = static_cast<int64_t>(left.size()), m = static_cast<int64_t>(right.size());
    while (x < n && x - k < m && left[static_cast<size_t>(x)] == right[static_cast<size_t>(x - k)]) ++x;
    return x;
  }

  static int64_t at(const Reached& reached, int64_t k, int64_t d) { return reached[static_cast<size_t>(k + d + 1)]; }

  /// Comes from the diagonal above (an element of `right` is skipped), or from the one below (one of `left` is).
  static bool skips_right(const Reached& before, int64_t k, int64_t d) {
    return k == -d || (k != d && at(before, k - 1, d) < at(before, k + 1, d));
  }

  /// `either`: the end of one of the two is enough.
  bool find(size_t most, bool either) {
    const auto n = static_cast<int64_t>(left.size()), m = static_cast<int64_t>(right.size());
    Reached now(3, 0);  // diagonals -1, 0, 1
    for (int64_t d = 0; d <= static_cast<int64_t>(most); ++d) {
      rounds.push_back(now);
      Reached next(static_cast<size_t>(2 * d + 5), 0);  // of d + 1: diagonals -d - 2 to d + 2
      for (int64_t k = -d; k <= d; k += 2) {
        const int64_t from = skips_right(now, k, d) ? at(now, k + 1, d) : at(now, k - 1, d) + 1;
        const int64_t x = run_on(d == 0 ? 0 : from, k);
        next[static_cast<size_t>(k + d + 2)] = x;
        if (x > n || x - k > m || (either ? x < n && x - k < m : x < n || x - k < m)) continue;
        left_end = x, right_end = x - k;
        return true;
      }
      now = std::move(next);
    }
    return false;
  }

  void trace_back(std::vector<uint32_t>& matches) const {
    int64_t x = left_end, y = right_end;
    for (auto d = static_cast<int64_t>(rounds.size()) - 1; d >= 0; --d) {
      const Reached& before = rounds[static_cast<size_t>(d)];
      const int64_t k = x - y;
      const bool skips = d > 0 && skips_right(before, k, d);
      const int64_t from = d == 0 ? 0 : skips ? at(before, k + 1, d) : at(before, k - 1, d) + 1;
      for (; x > from; --x, --y) matches[static_cast<size_t>(x - 1)] = static_cast<uint32_t>(y - 1);
      if (d > 0) (skips ? y : x) -= 1;
    }
  }
};

class Halves {
 public:
  Halves(std::span<const uint64_t> left, std::span<const uint64_t> right)
      : left_(left),
        right_(right),
        shift_(static_cast<int64_t>(right.size()) + 1),
        forward_(left.size() + right.size() + 3),
        backward_(left.size() + right.size() + 3),
        matches_(left.size(), kUnmatched) {}

  std::vector<uint32_t> match() {
    open_.push_back({0, static_cast<int64_t>(left_.size()), 0, static_cast<int64_t>(right_.size())});
    while (!open_.empty()) {
      const Part part = match_ends(open_.back());
      open_.pop_back();
      if (part.left == part.left_end || part.right == part.right_end) continue;
      const Place at = find_middle(part);
      open_.push_back({part.left, at.left, part.right, at.right});
      open_.push_back({at.left, part.left_end, at.right, part.right_end});
    }
    return std::move(matches_);
  }

 private:
  struct Part {
    int64_t left, left_end, right, right_end;
  };
  struct Place {
    int64_t left = 0, right = 0;
  };

  static constexpr int64_t kMostRounds = 8000;

  bool equal(int64_t x, int64_t y) const { return left_[static_cast<size_t>(x)] == right_[static_cast<size_t>(y)]; }
  int64_t& forward(int64_t k) { return forward_[static_cast<size_t>(k + shift_)]; }
  int64_t& backward(int64_t k) { return backward_[static_cast<size_t>(k + shift_)]; }

  Part match_ends(Part part) {
    const auto both_left = [&] { return part.left < part.left_end && part.right < part.right_end; };
    for (; both_left() && equal(part.left, part.right); ++part.left, ++part.right)
      matches_[static_cast<size_t>(part.left)] = static_cast<uint32_t>(part.right);
    for (; both_left() && equal(part.left_end - 1, part.right_end - 1); --part.left_end, --part.right_end)
      matches_[static_cast<size_t>(part.left_end - 1)] = static_cast<uint32_t>(part.right_end - 1);
    return part;
  }

  /// Of a part whose first elements differ, and its last ones: a place on a path with the fewest differences, at neither end.
  Place find_middle(const Part& part) {
    const int64_t from = part.left - part.right, to = part.left_end - part.right_end;
    const bool is_odd = ((to - from) & 1) != 0;
    forward(from) = part.left;
    backward(to) = part.left_end;
    for (int64_t d = 1;; ++d) {
      if (const auto met = step_forward(part, from, to, d, is_odd)) return *met;
      if (const auto met = step_backward(part, from, to, d, !is_odd)) return *met;
      if (d == kMostRounds) return farthest(part, from, to, d);
    }
  }

  /// The diagonals that `d` differences from `middle` reach within the part: first and last.
  static std::pair<int64_t, int64_t> diagonals(const Part& part, int64_t middle, int64_t d) {
    const int64_t least = part.left - part.right_end, most = part.left_end - part.right;
    const int64_t first = middle - d, last = middle + d;
    return {first >= least ? first : least + ((least - first) & 1), last <= most ? last : most - ((last - most) & 1)};
  }

  std::optional<Place> step_forward(const Part& part, int64_t from, int64_t to, int64_t d, bool may_meet) {
    const auto [first, last] = diagonals(part, from, d);
    const auto [other_first, other_last] = diagonals(part, to, d - 1);
    for (int64_t k = first; k <= last; k += 2) {
      const bool below = k - 1 >= from - (d - 1) && k - 1 >= part.left - part.right_end;
      const bool above = k + 1 <= from + (d - 1) && k + 1 <= part.left_end - part.right;
      int64_t x = below ? forward(k - 1) + 1 : part.left;
      if (above) x = std::max(x, forward(k + 1));
      x = std::min({x, part.left_end, part.right_end + k});
      while (x < part.left_end && x - k < part.right_end && equal(x, x - k)) ++x;
      forward(k) = x;
      if (may_meet && k >= other_first && k <= other_last && ((k - to - (d - 1)) & 1) == 0 && backward(k) <= x)
        return Place{x, x - k};
    }
    return std::nullopt;
  }

  std::optional<Place> step_backward(const Part& part, int64_t from, int64_t to, int64_t d, bool may_meet) {
    const auto [first, last] = diagonals(part, to, d);
    const auto [other_first, other_last] = diagonals(part, from, d);
    for (int64_t k = first; k <= last; k += 2) {
      const bool below = k - 1 >= to - (d - 1) && k - 1 >= part.left - part.right_end;
      const bool above = k + 1 <= to + (d - 1) && k + 1 <= part.left_end - part.right;
      int64_t x = above ? backward(k + 1) - 1 : part.left_end;
      if (below) x = std::min(x, backward(k - 1));
      x = std::max({x, part.left, part.right + k});
      while (x > part.left && x - k > part.right && equal(x - 1, x - k - 1)) --x;
      backward(k) = x;
      if (may_meet && k >= other_first && k <= other_last && ((k - from - d) & 1) == 0 && forward(k) >= x)
        return Place{x, x - k};
    }
    return std::nullopt;
  }

  Place farthest(const Part& part, int64_t from, int64_t to, int64_t d) {
    Place ahead{part.left, part.right}, behind{part.left_end, part.right_end};
    const auto [first, last] = diagonals(part, from, d);
    for (int64_t k = first; k <= last; k += 2) {
      if (2 * forward(k) - k > ahead.left + ahead.right) ahead = {forward(k), forward(k) - k};
    }
    const auto [back_first, back_last] = diagonals(part, to, d);
    for (int64_t k = back_first; k <= back_last; k += 2) {
      if (2 * backward(k) - k < behind.left + behind.right) behind = {backward(k), backward(k) - k};
    }
    const int64_t done = ahead.left + ahead.right - part.left - part.right;
    return done >= part.left_end + part.right_end - behind.left - behind.right ? ahead : behind;
  }

  std::span<const uint64_t> left_, right_;
  int64_t shift_;               ///< of the least diagonal
  Reached forward_, backward_;  ///< by diagonal
  std::vector<Part> open_;
  std::vector<uint32_t> matches_;
};

}  // namespace

std::vector<uint32_t> match_whole(std::span<const uint64_t> left, std::span<const uint64_t> right) {
  return Halves(left, right).match();
}

std::vector<uint32_t> match(std::span<const uint64_t> left, std::span<const uint64_t> right, size_t most_differences) {
  std::vector<uint32_t> matches(left.size(), kUnmatched);
  Search search{.left = left, .right = right};
  if (search.find(most_differences, false)) {
    search.trace_back(matches);
    return matches;
  }
  for (size_t i = 0; i < std::min(left.size(), right.size()) && left[i] == right[i]; ++i)
    matches[i] = static_cast<uint32_t>(i);
  return matches;
}

std::optional<CommonPart> match_until_one_ends(std::span<const uint64_t> left, std::span<const uint64_t> right,
                                               size_t most_differences) {
  Search search{.left = left, .right = right};
  if (!search.find(most_differences, true)) return {};
  CommonPart common{.partners = std::vector<uint32_t>(left.size(), kUnmatched),
                    .left_end = static_cast<size_t>(search.left_end),
                    .right_end = static_cast<size_t>(search.right_end)};
  search.trace_back(common.partners);
  return common;
}

}  // namespace oomdiag
