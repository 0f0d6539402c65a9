#include "profiler/match.h"

#include <algorithm>
#include <utility>

// Myers' O(ND) algorithm (Algorithmica 1, 1986). Each round is kept, so that the search can go back from wherever one of the sequences ends.
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

}  // namespace

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
