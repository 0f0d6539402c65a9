#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "profiler/explain/step_model.h"
#include "profiler/explain/what_if.h"
#include "profiler/replay/history.h"

// The rules of the fixes, one function each: it changes the allocations of the step as the fix would, and gives nothing where
// it has nothing to change. kFixes (fixes.cpp) says the rest.
namespace oomdiag {

/// "train.py:11", else the module or op that is known.
std::string short_place(const Where& made);

/// The largest batch up to `at_most` with which the step gets through the allocator. `batch` is its own: the result is below it
/// only where the step's peak is more than there is. 0 where the step is too long to simulate.
int64_t find_largest_batch(const StepModel& model, int64_t batch, int64_t at_most);

// fix_rules.cpp: what a step works on.
std::optional<ModifiedStep> use_expandable_segments(const StepModel& model);
std::optional<ModifiedStep> halve_batch(const StepModel& model);
std::optional<ModifiedStep> fit_batch(const StepModel& model);
std::optional<ModifiedStep> accumulate(const StepModel& model);
std::optional<ModifiedStep> use_relu_in_place(const StepModel& model);
std::optional<ModifiedStep> use_no_grad(const StepModel& model);
std::optional<ModifiedStep> drop_outputs(const StepModel& model);
std::optional<ModifiedStep> stop_growth(const StepModel& model);
// autocast.cpp, checkpointing.cpp
inline constexpr std::string_view kAutocastFormula =
    "half of what matrix products, convolutions and the ops after them make; float32 stays in softmax, norms and "
    "losses; "
    "+ half of the weights";
std::optional<ModifiedStep> use_bf16_autocast(const StepModel& model);
std::optional<ModifiedStep> use_fp16_autocast(const StepModel& model);
/// The list of modules that makes most of the step, as Python: "model.blocks"; "model.layers" where none is known.
std::string name_layers(const Allocations& blocks);
std::optional<ModifiedStep> checkpoint_modules(const StepModel& model);
/// A complete step with the modules of these paths checkpointed, each by itself; none of them is inside of another.
Allocations checkpoint_paths(const Allocations& blocks, std::span<const std::string> paths);
// state_rules.cpp: gradients, and what optimizers keep.
std::optional<ModifiedStep> set_gradients_to_none(const StepModel& model);
std::optional<ModifiedStep> use_fused_optimizer(const StepModel& model);
std::optional<ModifiedStep> use_loop_optimizer(const StepModel& model);
std::optional<ModifiedStep> use_plain_sgd(const StepModel& model);
std::optional<ModifiedStep> use_8bit_adam(const StepModel& model);
std::optional<ModifiedStep> offload_optimizer(const StepModel& model);
std::optional<ModifiedStep> shard_over_devices(const StepModel& model);
std::optional<ModifiedStep> train_adapters(const StepModel& model);
// language_rules.cpp: attention, logits, sequences.
std::optional<ModifiedStep> use_fused_attention(const StepModel& model);
std::optional<ModifiedStep> use_chunked_cross_entropy(const StepModel& model);
std::optional<ModifiedStep> halve_sequence(const StepModel& model);
std::optional<ModifiedStep> offload_activations(const StepModel& model);

}  // namespace oomdiag
