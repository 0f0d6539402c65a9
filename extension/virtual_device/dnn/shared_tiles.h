#pragma once

#include <cudnn.h>

#include <cstdint>

namespace oomdiag {

/// A convolution without groups, or one of its gradients, as the product of matrices that it is.
struct ConvolutionProduct {
  int64_t rows = 0, columns = 0, inner = 0;
  int64_t column_blocks =
      1;  ///< each has `columns` of its own: of the gradient of the weights, those of each place of the window
  int64_t element_bytes = 0;
  int64_t tensor_bytes =
      0;  ///< of all three tensors, but of weights whose window is 1: these lie in both layouts alike
};

/// Which part of the product a thread block computes, and how many of them make a cluster, which runs on neighbouring multiprocessors.
struct BlockShape {
  int64_t rows = 0, columns = 0;
  int64_t cluster_rows = 1, cluster_columns = 1;
};

/// Bytes of workspace that a plan for `product` wants on an H100 or H200, for `bytes` that cuDNN gives for a GPU that is only described.
/// Where there are few tiles of the result, or few are left after whole waves of them, thread blocks share a tile: each adds up a part, for
/// which it has a tile in the workspace. On a GPU cuDNN lets as many share one as run at once; for a described one it counts with 18 blocks.
/// `bytes` itself, where it is not made up as that rule says. Of tests/truth/h200_plans.csv the rule holds for all plans of float32 whose
/// tiles are known, and for those in half precision that are not left out here.
int64_t find_workspace_of_shared_tiles(const ConvolutionProduct& product, const BlockShape& block, int64_t bytes);

/// The shape that a plan's knobs give; none of a plan that does not say it, or whose tiles are not known.
bool read_block_shape(cudnnBackendDescriptor_t plan, BlockShape* block);

}  // namespace oomdiag
