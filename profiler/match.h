#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace oomdiag {

inline constexpr uint32_t kUnmatched = ~uint32_t{0};

/// For each element of `left` the index of the one of `right` that stands for it, ascending, or kUnmatched: a longest common
/// subsequence. Linear where the two differ little; where they differ in more than `most_differences` nothing behind the common
/// beginning matches.
std::vector<uint32_t> match(std::span<const uint64_t> left, std::span<const uint64_t> right,
                            size_t most_differences = 4000);

/// The same of any two sequences, from end to end: a longest one where they have up to about half a million elements each or differ in up to
/// 16 000, else a long one.
std::vector<uint32_t> match_whole(std::span<const uint64_t> left, std::span<const uint64_t> right);

/// What two sequences have in common up to where one of them ends.
struct CommonPart {
  std::vector<uint32_t> partners{};    ///< as of match()
  size_t left_end = 0, right_end = 0;  ///< how much of each was matched: all of one of them at least
};

/// The same where one of the two may go on: what follows in it is no difference. Nullopt where they differ in more than
/// `most_differences`.
std::optional<CommonPart> match_until_one_ends(std::span<const uint64_t> left, std::span<const uint64_t> right,
                                               size_t most_differences = 4000);

}  // namespace oomdiag
