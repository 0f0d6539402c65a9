#pragma once

#include <cstdint>
#include <set>
#include <string_view>
#include <vector>

#include "profiler/replay/history.h"

// What would the peak of a step be if some of its blocks were smaller, or lived shorter? The blocks' lives are changed and
// laid over each other again. So a change that moves the peak to another place of the step is predicted right, too.
namespace oomdiag {

using Allocations = std::vector<StepAllocation>;

/// The bytes in use at each position of the step, from its beginning; the last is what is left at its end.
std::vector<int64_t> list_bytes_in_use(const Allocations& blocks);

/// The most bytes in use at once.
int64_t find_peak(const Allocations& blocks);

/// The position of the first block that an autograd node allocated, or StepAllocation::kNever.
uint32_t find_backward(const Allocations& blocks);

/// The position of the last block that an autograd node allocated, or 0.
uint32_t find_last_backward(const Allocations& blocks);

/// Whether a workspace made there grows with the batch. cuBLAS sizes its own by the GPU. Those of cuDNN do: most are
/// copies of what a convolution reads and writes, in the layout of its kernel. (Of 573 times that the batch was halved, 14
/// shapes, two types, forward and backward, on three GPUs, 515 workspaces halved to within 5 % or the weights, 51 gave way
/// to another plan, 7 stayed.) So do those of attention and of recurrent layers.
bool workspace_follows_batch(const Where& made);

/// Whether what an optimizer's step makes of this category follows the batch, as a closure calls the model once more: temporaries of the
/// step itself are as large as the weights.
bool follows_batch_in_optimizer(Category category);

/// Whether autograd recorded what this step made; nothing where no module ran in it, which would show it.
std::optional<bool> builds_graph(const StepAllocations& step);

/// Whether the bytes of this block follow the batch size: what forward and backward pass on, save for the gradients of
/// parameters. Data from setup counts where autograd saved it: then it is the batch itself.
bool follows_batch(const StepAllocation& block, const Allocations& blocks);

/// Bytes of the parameters and gradients among `blocks`.
std::set<int64_t> list_parameter_sizes(const Allocations& blocks);

/// Whether autocast made it of a parameter of one of these sizes: half its bytes, kept until the region ends.
bool is_weight_cast(const StepAllocation& block, const std::set<int64_t>& parameter_sizes);

/// `blocks` as they would be at `numerator`/`denominator` of the batch.
Allocations scale_batch(Allocations blocks, int64_t numerator, int64_t denominator);

/// Whether the model is of float32: most bytes of the parameters, else of all tensors whose type is known.
bool is_mostly_float32(const Allocations& blocks);

/// Whether `module` is `prefix` or inside of it.
bool is_inside(std::string_view module, std::string_view prefix);

}  // namespace oomdiag
