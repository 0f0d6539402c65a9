#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "profiler/cost/metered_operator.h"
#include "profiler/cost/products.h"

// What an operator has to do, from the shapes of its inputs and outputs.
namespace oomdiag {

enum class WorkPrecision { fp32, fp16, bf16, fp64, fp8, int8, other };
inline constexpr size_t kWorkPrecisions = 7;
std::string_view name_of(WorkPrecision precision);

/// Kinds of kernels, each of which has an efficiency of its own (time_model.h).
enum class WorkKind {
  matrix_product,
  fp32_product,  ///< on CUDA cores, as PyTorch allows no TF32 there by default
  convolution,
  grouped_convolution,
  depthwise_convolution,
  attention,
  rnn,
  elementwise,
  normalization,
  softmax,
  reduction,
  pooling,
  interpolation,  ///< but of nearest neighbours, whose kernel is as parallel as a pooling's
  indexing,
  embedding_gradient,  ///< of the table: indices are sorted first
  label_loss,          ///< nll_loss, which has few elements for each row
  copy,
  factorization,  ///< of matrices, column by column
  optimizer,
  fused,  ///< kernels that no operator launches: of torch.compile, Triton, CuPy
  other
};
std::string_view name_of(WorkKind kind);

/// Kernels whose thread blocks take their elements one after the other, however many blocks there are: batch normalization in training has
/// a block for each channel, interpolation a thread for each place of the output, which takes all images and channels.
struct SerialBlocks {
  int64_t blocks = 0, elements = 0;  ///< of a block
  bool of_cudnn = false;             ///< or PyTorch's own
};

/// How a kernel comes to its elements. Kernels that work on one element after the other where the shapes or the dtypes of their tensors
/// differ take as long for a small element as for a large one.
enum class ElementOrder { plain, mixed, strided };  ///< strided: neighbours lie apart in memory

/// Who computes a depthwise convolution, by the rules of ATen/native/Convolution.cpp (use_cudnn_depthwise).
enum class DepthwiseKernel { pytorch, cudnn, cudnn_channels_last };

/// What one call does.
struct OperatorWork {
  WorkKind kind = WorkKind::other;
  bool is_backward = false;  ///< a kernel of its own for gradients
  WorkPrecision precision = WorkPrecision::other;
  std::vector<MatrixProduct> products{};
  int64_t memory_bytes = 0;  ///< each input is read once, each output written once
  int64_t bus_bytes = 0;     ///< between host and GPU
  std::optional<SerialBlocks> serial_blocks{};
  int64_t turns = 0;  ///< rows that it normalizes or adds up, or elements that it takes one by one
  ElementOrder order = ElementOrder::plain;
  int64_t alignment = 8;  ///< of products: the largest power of two up to 8 that divides all rows in memory
  int64_t window = 1;     ///< elements of a convolution's window
  DepthwiseKernel depthwise = DepthwiseKernel::pytorch;
  bool is_layer_norm = false;
  bool scatters = false;   ///< writes where an index says
  bool is_causal = false;  ///< attention whose later positions are hidden from earlier ones by a flag
  int64_t launches = 0;    ///< one, or one of each tensor of a list
  int64_t tensors = 1;     ///< of the first input, where that is a list
  bool is_metered = true;  ///< false: it computes products of which there is no rule

  int64_t flops() const;
};

/// Rounded up.
constexpr int64_t divide_up(int64_t amount, int64_t by) { return (amount + by - 1) / by; }

/// The work of one call.
OperatorWork work_of(const MeteredOperator& metered);

}  // namespace oomdiag
