#include "profiler/snapshot/align.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "profiler/match.h"
#include "profiler/trace/mix.h"

// Where two sequences differ by a few thousand elements, Myers' algorithm finds the fewest (match.h). Runs of one program with
// two batch sizes differ in nearly every size, and then O(n ∙ differences) is O(n²). Allocation sequences have long equal
// stretches, so it is enough to find where the next one begins:
//
//   left   a b c d e f g h            nearby: the fewest skipped elements after which eight in a row are equal
//   right  a b X Y c d e f g h        far: the same, among the stretches of eight that occur in a window of the right side
//
// Where neither finds anything, elements of one kind are paired as changed, and the search is given up for a while.

namespace oomdiag {
namespace {

constexpr size_t kStretch = 8;
constexpr size_t kNear = 48;
constexpr size_t kFar = 1 << 16;
constexpr size_t kMaxPatience = 256;
constexpr size_t kMaxByMyers = 2000;  // differences; what the search keeps grows with their square: 32 MB

struct Skip {
  size_t left = 0, right = 0;
};

class Aligner {
 public:
  Aligner(std::span<const uint64_t> left, std::span<const uint64_t> right, size_t most_gaps)
      : left_(left), right_(right), most_gaps_(most_gaps) {}

  /// By what Myers' algorithm found.
  Alignment align_by(const CommonPart& common) {
    for (size_t next = 0; next < common.left_end; ++next) {
      if (common.partners[next] == kUnmatched) continue;
      apply({next - i_, common.partners[next] - j_});
      ++result_.equal, ++i_, ++j_;
    }
    apply({common.left_end - i_, common.right_end - j_});
    result_.left_rest = left_.size() - i_;
    result_.right_rest = right_.size() - j_;
    return std::move(result_);
  }

  Alignment align() {
    while (i_ < left_.size() && j_ < right_.size()) {
      if (left_[i_] == right_[j_]) {
        ++result_.equal, ++i_, ++j_;
      } else {
        step_over();
      }
    }
    result_.left_rest = left_.size() - i_;
    result_.right_rest = right_.size() - j_;
    return std::move(result_);
  }

 private:
  void step_over() {
    std::optional<Skip> skip;
    if (patience_ == 0) skip = search();
    if (skip) {
      wait_ = 1;
      return apply(*skip);
    }
    if (patience_ == 0) {
      patience_ = wait_;
      wait_ = std::min(wait_ * 2, kMaxPatience);
    }
    --patience_;
    const bool alike = (left_[i_] & 15) == (right_[j_] & 15);
    if (alike) return apply({1, 1});
    // Not even of one kind: leave out the side whose next element fits better.
    const bool drop_left = i_ + 1 < left_.size() && (left_[i_ + 1] & 15) == (right_[j_] & 15);
    apply(drop_left ? Skip{1, 0} : Skip{0, 1});
  }

  void apply(const Skip& skip) {
    const size_t pairs = std::min(skip.left, skip.right);
    for (size_t p = 0; p < pairs; ++p) note(Gap::Kind::changed, i_++, j_++);
    for (size_t p = pairs; p < skip.left; ++p) note(Gap::Kind::only_left, i_++, j_);
    for (size_t p = pairs; p < skip.right; ++p) note(Gap::Kind::only_right, i_, j_++);
  }

  void note(Gap::Kind kind, size_t left, size_t right) {
    if (kind == Gap::Kind::changed) ++result_.changed;
    if (kind == Gap::Kind::only_left) ++result_.only_left;
    if (kind == Gap::Kind::only_right) ++result_.only_right;
    if (result_.first.size() < most_gaps_) result_.first.push_back({kind, left, right});
  }

  bool agree(size_t i, size_t j) const {
    const size_t rest = std::min(left_.size() - std::min(i, left_.size()), right_.size() - std::min(j, right_.size()));
    if (rest == 0) return false;
    const bool to_the_end = rest < kStretch && left_.size() - i == right_.size() - j;
    if (rest < kStretch && !to_the_end) return false;
    return std::equal(left_.begin() + static_cast<std::ptrdiff_t>(i),
                      left_.begin() + static_cast<std::ptrdiff_t>(i + std::min(rest, kStretch)),
                      right_.begin() + static_cast<std::ptrdiff_t>(j));
  }

  std::optional<Skip> search() {
    for (size_t sum = 1; sum <= kNear; ++sum) {
      if (sum % 2 == 0 && agree(i_ + sum / 2, j_ + sum / 2))
        return Skip{sum / 2, sum / 2};  // changed, rather than extra
      for (size_t left = 0; left <= sum; ++left) {
        if (agree(i_ + left, j_ + sum - left)) return Skip{left, sum - left};
      }
    }
    return search_far();
  }

  static uint64_t hash(std::span<const uint64_t> elements, size_t at) {
    uint64_t sum = 0;
    for (size_t k = 0; k < kStretch; ++k) sum = spread(sum ^ elements[at + k]) + k;
    return sum;
  }

  std::optional<Skip> search_far() {
    if (left_.size() - i_ < kStretch || right_.size() - j_ < kStretch || i_ < next_far_) return std::nullopt;
    next_far_ = i_ + kFar / 2;
    std::unordered_map<uint64_t, size_t> places;
    for (size_t j = j_; j + kStretch <= std::min(right_.size(), j_ + kFar); ++j) places.try_emplace(hash(right_, j), j);
    std::optional<Skip> best;
    for (size_t i = i_; i + kStretch <= std::min(left_.size(), i_ + kFar); ++i) {
      if (best && i - i_ >= best->left + best->right) break;
      const auto found = places.find(hash(left_, i));
      if (found == places.end() || !agree(i, found->second)) continue;
      const Skip skip{i - i_, found->second - j_};
      if (!best || skip.left + skip.right < best->left + best->right) best = skip;
    }
    if (best) next_far_ = 0;
    return best;
  }

  std::span<const uint64_t> left_, right_;
  size_t most_gaps_;
  size_t i_ = 0, j_ = 0;
  size_t next_far_ = 0;             ///< no far search before this place of the left side
  size_t patience_ = 0, wait_ = 1;  ///< mismatches to pass without a search; and after the next failed search
  Alignment result_;
};

}  // namespace

// Where nearly all elements differ, the fewest differences may be to leave out one side: then the nearest places where the
// sequences agree say more.
Alignment align(std::span<const uint64_t> left, std::span<const uint64_t> right, size_t most_gaps) {
  Alignment nearest = Aligner(left, right, most_gaps).align();
  if (nearest.equal == std::min(left.size(), right.size())) return nearest;
  const auto common = match_until_one_ends(left, right, kMaxByMyers);
  if (!common) return nearest;
  Alignment fewest = Aligner(left, right, most_gaps).align_by(*common);
  return fewest.equal > nearest.equal ? fewest : nearest;
}

}  // namespace oomdiag
