#include "profiler/snapshot/align.h"

#include <algorithm>
#include <utility>

#include "profiler/match.h"

// Elements are matched by the fewest differences (match.h): up to where one of the two ends, or where they differ in more than that can find,
// from end to end. What lies between two matches is paired as changed, as far as both have something there.

namespace oomdiag {
namespace {

constexpr size_t kMaxUntilOneEnds = 2000;  // differences; what the search keeps grows with their square: 32 MB

class Aligner {
 public:
  Aligner(std::span<const uint64_t> left, std::span<const uint64_t> right, size_t most_gaps)
      : left_(left), right_(right), most_gaps_(most_gaps) {}

  Alignment align_by(const CommonPart& common) {
    for (size_t next = 0; next < common.left_end; ++next) {
      if (common.partners[next] == kUnmatched) continue;
      apply(next - i_, common.partners[next] - j_);
      ++result_.equal, ++i_, ++j_;
    }
    apply(common.left_end - i_, common.right_end - j_);
    result_.left_rest = left_.size() - i_;
    result_.right_rest = right_.size() - j_;
    return std::move(result_);
  }

 private:
  /// So many of each side stand before the next match.
  void apply(size_t left, size_t right) {
    const size_t pairs = std::min(left, right);
    for (size_t p = 0; p < pairs; ++p) note(Gap::Kind::changed, i_++, j_++);
    for (size_t p = pairs; p < left; ++p) note(Gap::Kind::only_left, i_++, j_);
    for (size_t p = pairs; p < right; ++p) note(Gap::Kind::only_right, i_, j_++);
  }

  void note(Gap::Kind kind, size_t left, size_t right) {
    if (kind == Gap::Kind::changed) ++result_.changed;
    if (kind == Gap::Kind::only_left) ++result_.only_left;
    if (kind == Gap::Kind::only_right) ++result_.only_right;
    if (result_.first.size() < most_gaps_) result_.first.push_back({kind, left, right});
  }

  std::span<const uint64_t> left_, right_;
  size_t most_gaps_;
  size_t i_ = 0, j_ = 0;
  Alignment result_;
};

}  // namespace

Alignment align(std::span<const uint64_t> left, std::span<const uint64_t> right, size_t most_gaps) {
  const auto until_one_ends = match_until_one_ends(left, right, kMaxUntilOneEnds);
  Alignment found = until_one_ends ? Aligner(left, right, most_gaps).align_by(*until_one_ends) : Alignment{};
  if (found.equal == std::min(left.size(), right.size())) return found;
  Alignment whole =
      Aligner(left, right, most_gaps)
          .align_by({.partners = match_whole(left, right), .left_end = left.size(), .right_end = right.size()});
  return found.equal >= whole.equal ? found : whole;
}

}  // namespace oomdiag
