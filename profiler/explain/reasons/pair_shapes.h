#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/reasons/reasons.h"
#include "profiler/replay/history.h"

// What an op was to make of how much, and as how many rows × how many rows.

namespace oomdiag {

/// What the op that failed was to make, with what lives of as many elements; and the largest of what lives beside.
struct Expansion {
  std::vector<const LiveBlock*> alike{};
  std::vector<const LiveBlock*> others{};  ///< one of each size
  int64_t bytes = 0;
  int64_t largest_other_bytes = 0;
  Where failed{};
  /// The op of the step whose result first had as many elements, freed since or not: one of equal sizes would have had its operand
  /// before. Empty where the step shows nothing.
  Where first{};

  /// Whether all ops that made it are among `makers` or `followers`, the first one among `makers`.
  template <class IsMaker, class IsFollower>
  const Where* find_maker(const IsMaker& is_maker, const IsFollower& is_follower) const {
    if (!is_maker(failed) && !is_follower(failed)) return nullptr;
    const Where* maker = alike.empty() && is_maker(failed) ? &failed : nullptr;
    for (const LiveBlock* block : alike) {
      if (is_maker(block->made)) {
        maker = &block->made;
      } else if (!is_follower(block->made)) {
        return nullptr;
      }
    }
    return maker;
  }

  /// Whether one of the ops that made it is such a one.
  template <class IsSuch>
  bool has_op(const IsSuch& is_such) const {
    return is_such(failed) || std::ranges::any_of(alike, [&](const LiveBlock* block) { return is_such(block->made); });
  }
};

/// Of the op that failed; nothing where what lives beside is not far smaller.
std::optional<Expansion> find_expansion(const ReasonFacts& facts);

/// A result of rows × rows: its shape, or only how many rows.
struct Square {
  std::string text{};
  bool has_width = false;  ///< [n, m, d], and not only [n, m]
  int64_t bytes = 0;
  bool batched = false;     ///< [batch, heads, n, n] of tensors with several columns
  bool of_columns = false;  ///< both operands have one column: [n, 1] and [n]
};

/// The requested bytes as rows × rows (× width) of tensors whose shapes are known.
Square factor_shapes(const ReasonFacts& facts, int64_t bytes, bool of_product);

/// The same of a product of batches: rows of all heads lie in one matrix, and each head multiplies its own with one another.
Square factor_heads(const ReasonFacts& facts, int64_t bytes);

/// The same of tensors of which only the sizes are known.
Square factor_sizes(const Expansion& expansion, int64_t bytes, bool of_product);

/// By shapes where these are known; of what was requested, else of what lives of as many elements.
Square factor_result(const ReasonFacts& facts, const Expansion& expansion, bool of_product);

}  // namespace oomdiag
