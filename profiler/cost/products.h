#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "profiler/cost/metered_operator.h"

namespace oomdiag {

/// `batch` products of an m x k by a k x n matrix.
struct MatrixProduct {
  int64_t batch = 1, m = 0, n = 0, k = 0;
  int64_t window = 1;  ///< of a convolution, whose inner dimension is that of its channels for each place of the window
  int64_t steps = 1;   ///< of a recurrent network: so many times, each after the one before

  /// A multiplication and an addition are two.
  int64_t flops() const { return 2 * batch * m * n * k * steps; }
  bool operator==(const MatrixProduct&) const = default;
};

/// The matrix products that one call of the operator computes, empty for one that computes none. None where it computes some and there
/// is no rule for it, or its shapes are not as the rule has them. Their FLOPs are those of torch.utils.flop_counter, but for the weight's
/// gradient of grouped convolutions, which that counts as if there were no groups.
std::optional<std::vector<MatrixProduct>> products_of(const MeteredOperator& metered);

}  // namespace oomdiag
