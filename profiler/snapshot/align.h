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

/// Aligns two sequences. Elements are equal, or `alike` where they differ by no more than their upper 60 bits: then they
/// may stand for each other as changed. Linear where the sequences are equal; where they are not, looks for the nearest
/// place where they agree again, first nearby, then by what is common within some ten thousand elements.
Alignment align(std::span<const uint64_t> left, std::span<const uint64_t> right, size_t most_gaps);

}  // namespace oomdiag
