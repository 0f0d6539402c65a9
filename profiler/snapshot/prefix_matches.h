#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace oomdiag {

/// Finds for each place of a row how many elements from there on are those with which `pattern` begins: the Z algorithm.
/// What agreed from an earlier place on is a piece of the pattern, and of that it is known how far it agrees with the
/// pattern itself. So each element is compared about twice, also where both rows repeat themselves.
template <class Element, class Equal>
class PrefixMatches {
 public:
  PrefixMatches(std::span<const Element> pattern, Equal equal) : pattern_(pattern), equal_(equal) {
    own_.reserve(pattern.size());
    if (!pattern.empty()) own_.push_back(pattern.size());
    for (size_t place = 1; place < pattern.size(); ++place) own_.push_back(next(pattern, place));
    begin_ = end_ = 0;
  }

  /// Places must ascend, and `row` be the same.
  size_t next(std::span<const Element> row, size_t place) {
    size_t count = place < end_ ? std::min(own_[place - begin_], end_ - place) : 0;
    const size_t most = std::min(pattern_.size(), row.size() - place);
    while (count < most && equal_(pattern_[count], row[place + count])) ++count;
    if (place + count > end_) begin_ = place, end_ = place + count;
    return count;
  }

 private:
  std::span<const Element> pattern_;
  Equal equal_;
  std::vector<size_t> own_;     ///< the same for the pattern itself
  size_t begin_ = 0, end_ = 0;  ///< the piece of the row that agrees with the pattern and reaches farthest
};

}  // namespace oomdiag
