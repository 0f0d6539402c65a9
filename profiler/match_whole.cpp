#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "profiler/match.h"

// A longest common subsequence from end to end in linear space. Where the sequences differ little, Myers' search from both ends (Algorithmica
// 1, 1986, section 4b) divides them where the two searches meet; where they differ nearly everywhere, as those of two batch sizes do,
// Hirschberg's lengths do (Communications of the ACM 18, 1975), sixty-four at a time. What is too long for these is divided where a search has
// come farthest, which need not be on a longest one.
//
// `forward(k)`, `backward(k)`: how far along diagonal k, left - right, the paths with d differences get.

namespace oomdiag {
namespace {

std::vector<uint64_t> reversed(std::span<const uint64_t> keys) { return {keys.rbegin(), keys.rend()}; }

/// How long the longest common subsequences of `rows` and each beginning of `columns` are, from the empty one on. A bit of `is_no_longer` is 0
/// where one more column makes it longer by one (Hyyrö, "Bit-parallel LCS-length computation revisited", 2004).
std::vector<uint32_t> common_lengths(std::span<const uint64_t> rows, std::span<const uint64_t> columns) {
  struct Word {
    size_t at;      ///< of `is_no_longer`
    uint64_t bits;  ///< the columns where a value stands
  };
  std::unordered_map<uint64_t, std::vector<Word>> places;
  for (size_t i = 0; i < columns.size(); ++i) {
    std::vector<Word>& words = places[columns[i]];
    if (words.empty() || words.back().at != i / 64) words.push_back({i / 64, 0});
    words.back().bits |= uint64_t{1} << (i % 64);
  }

  std::vector<uint64_t> is_no_longer(columns.size() / 64 + 1, ~uint64_t{0});
  uint64_t carry = 0;
  const auto add = [&](size_t at, uint64_t bits) {
    const uint64_t before = is_no_longer[at];
    const uint64_t sum = before + (before & bits), with_carry = sum + carry;
    carry = static_cast<uint64_t>(sum < before || with_carry < sum);
    is_no_longer[at] = with_carry | (before & ~bits);
  };
  for (const uint64_t value : rows) {
    const auto found = places.find(value);
    if (found == places.end()) continue;
    carry = 0;
    size_t next = 0;
    for (const auto& [at, bits] : found->second) {
      for (; carry != 0 && next < at; ++next) add(next, 0);
      add(at, bits);
      next = at + 1;
    }
    for (; carry != 0 && next < is_no_longer.size(); ++next) add(next, 0);
  }

  std::vector<uint32_t> lengths{0};
  for (size_t i = 0; i < columns.size(); ++i)
    lengths.push_back(lengths.back() + static_cast<uint32_t>(~is_no_longer[i / 64] >> (i % 64) & 1));
  return lengths;
}

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

  static constexpr int64_t kLeastRounds = 256, kMaxRounds = 8000;
  static constexpr int64_t kMaxWords = int64_t{1} << 32;  ///< a few seconds

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
    const int64_t words = (part.left_end - part.left) * (part.right_end - part.right) / 64;
    const int64_t most = std::clamp(static_cast<int64_t>(std::sqrt(words)), kLeastRounds, kMaxRounds);
    for (int64_t d = 1; d <= most; ++d) {
      if (const auto met = step_forward(part, from, to, d, is_odd)) return *met;
      if (const auto met = step_backward(part, from, to, d, !is_odd)) return *met;
    }
    return words <= kMaxWords ? divide_by_lengths(part) : farthest(part, from, to, most);
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

  /// Hirschberg's: half of the longer sequence, and the beginning of the other one with which that half and the rest have most in common.
  Place divide_by_lengths(const Part& part) const {
    const std::span left =
        left_.subspan(static_cast<size_t>(part.left), static_cast<size_t>(part.left_end - part.left));
    const std::span right =
        right_.subspan(static_cast<size_t>(part.right), static_cast<size_t>(part.right_end - part.right));
    const bool is_left_longer = left.size() > right.size();
    const std::span longer = is_left_longer ? left : right, shorter = is_left_longer ? right : left;
    const size_t half = longer.size() / 2;
    const auto before = common_lengths(longer.first(half), shorter);
    const auto behind = common_lengths(reversed(longer.subspan(half)), reversed(shorter));
    size_t best = 0;
    for (size_t i = 1; i <= shorter.size(); ++i) {
      if (before[i] + behind[shorter.size() - i] > before[best] + behind[shorter.size() - best]) best = i;
    }
    return {part.left + static_cast<int64_t>(is_left_longer ? half : best),
            part.right + static_cast<int64_t>(is_left_longer ? best : half)};
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
  int64_t shift_;                            ///< of the least diagonal
  std::vector<int64_t> forward_, backward_;  ///< by diagonal
  std::vector<Part> open_;
  std::vector<uint32_t> matches_;
};

}  // namespace

std::vector<uint32_t> match_whole(std::span<const uint64_t> left, std::span<const uint64_t> right) {
  return Halves(left, right).match();
}

}  // namespace oomdiag
