#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oomdiag {

/// Where two sequences differ: `left` and `right` are positions. Of a changed pair both count, else only the one that has
/// the extra element.
struct Gap {
  enum class Kind : uint8_t { changed, only_left, only_right };
  Kind kind = Kind::changed;
  size_t left = 0, right = 0;

  bool operator==(const Gap&) const = default;
};

struct Alignment {
  uint64_t equal = 0, changed = 0, only_left = 0, only_right = 0;
  uint64_t left_rest = 0, right_rest = 0;  ///< what is left of one sequence where the other ends
  std::vector<Gap> first{};                ///< the first differences

  bool operator==(const Alignment&) const = default;
};

/// Aligns two sequences: as many elements are equal as can be, up to where one of them ends or from end to end, whichever is more.
/// Others that lie between the same two equal ones stand for each other as changed. Linear where the sequences are equal.
Alignment align(std::span<const uint64_t> left, std::span<const uint64_t> right, size_t most_gaps);

}  // namespace oomdiag
