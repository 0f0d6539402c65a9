#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oomdiag {

inline constexpr uint32_t kUnmatched = ~uint32_t{0};

/// For each element of `left` the index of the one of `right` that stands for it, ascending, or kUnmatched: a longest common
/// subsequence. Linear where the two differ little; where they differ in more than `most_differences` nothing behind the common
/// beginning matches.
std::vector<uint32_t> match(std::span<const uint64_t> left, std::span<const uint64_t> right,
                            size_t most_differences = 4000);

}  // namespace oomdiag
