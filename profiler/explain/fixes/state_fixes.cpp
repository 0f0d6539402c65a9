#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "profiler/explain/fixes/fix_rules.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"

// What gradients and optimizers take, and what takes less.

namespace oomdiag {
namespace {

bool is_optimizer_temporary(const StepAllocation& block) {
  return block.phase == Phase::optimizer && block.category == Category::temporary && block.is_of_step();
}

int64_t sum_of(const Allocations& blocks, bool (*counts)(const StepAllocation&)) {
  int64_t sum = 0;
  for (const StepAllocation& block : blocks) sum += counts(block) ? block.bytes : 0;
  return sum;
}

bool is_state(const StepAllocation& block) { return block.category == Category::optimizer_state; }

bool is_adam(std::string_view optimizer) { return optimizer == "Adam" || optimizer == "AdamW"; }

bool is_gradient(const StepAllocation& block) {
  return block.category == Category::gradient || block.freed_by_accumulate;
}

bool is_parameter(const StepAllocation& block) { return block.category == Category::parameter; }

// The step makes gradients for backward, and the backward pass for them; what an earlier one left is there already.
int64_t sum_once(const Allocations& blocks, bool (*counts)(const StepAllocation&)) {
  int64_t before = 0, made = 0;
  for (const StepAllocation& block : blocks) {
    if (counts(block)) (!block.is_of_step() ? before : made) += block.bytes;
  }
  return std::max(before, made);
}

std::string class_of(const StepModel& model) {
  return "torch.optim." + std::string(model.optimizer.empty() ? "AdamW" : model.optimizer);
}

std::string call_of(const StepModel& model, std::string_view argument) {
  return class_of(model) + "(model.parameters(), …, " + std::string(argument) + ")";
}

/// Worth another way of training, or other devices: a tenth of the peak.
bool is_much(const StepModel& model, int64_t bytes) { return bytes * 10 >= model.peak_bytes; }

/// zero_grad(set_to_none=True): a gradient is not kept through forward; it begins where backward makes it, and the copy
/// that was added to it is the gradient itself.
std::optional<ModifiedStep> set_gradients_to_none(const StepModel& model) {
  Allocations blocks = model.blocks;
  std::multimap<int64_t, StepAllocation*> made;  // by bytes: what AccumulateGrad added and freed
  for (StepAllocation& block : blocks) {
    if (block.freed_by_accumulate && block.phase == Phase::backward) made.emplace(block.bytes, &block);
  }
  bool any = false;
  for (StepAllocation& block : blocks) {
    if (block.category != Category::gradient || block.is_of_step()) continue;
    const auto same_size = made.find(block.bytes);
    if (same_size == made.end()) continue;
    block.born = same_size->second->born;
    same_size->second->bytes = 0;
    made.erase(same_size);
    any = true;
  }
  if (!any) return {};
  return ModifiedStep{.blocks = std::move(blocks)};
}

/// A fused optimizer computes in registers: its temporaries go.
std::optional<ModifiedStep> use_fused_optimizer(const StepModel& model) {
  Allocations blocks = model.blocks;
  if (sum_of(blocks, is_optimizer_temporary) == 0) return {};
  for (StepAllocation& block : blocks) {
    if (is_optimizer_temporary(block)) block.bytes = 0;
  }
  return ModifiedStep{.blocks = std::move(blocks), .lines = {call_of(model, "fused=True")}};
}

/// foreach=False: one parameter at a time, at most two temporaries of its size. (Adam: √v and √v divided by the bias
/// correction.) In place of all temporaries of the step the two of the largest parameter are alive.
std::optional<ModifiedStep> use_loop_optimizer(const StepModel& model) {
  Allocations blocks = model.blocks;
  int64_t largest = 0, largest_parameter = 0;
  StepAllocation* first = nullptr;
  uint32_t last_death = 0;
  for (StepAllocation& block : blocks) {
    if (block.category == Category::parameter) largest_parameter = std::max(largest_parameter, block.bytes);
    if (!is_optimizer_temporary(block)) continue;
    if (block.made.op.find("foreach") != block.made.op.npos ||
        block.made.inner.find("foreach") != block.made.inner.npos) {
      if (first == nullptr) first = &block;
      if (block.died != StepAllocation::kNever) last_death = std::max(last_death, block.died);
      largest = std::max(largest, block.bytes);
    }
    if (&block != first) block.bytes = 0;
  }
  if (first == nullptr) return {};
  // What a step that was cut short would still have made is one block for all.
  first->bytes = 2 * (largest_parameter > 0 ? std::min(largest, largest_parameter) : largest);
  first->died = std::max(last_death, first->born + 1);
  return ModifiedStep{.blocks = std::move(blocks), .lines = {call_of(model, "foreach=False")}};
}

/// SGD without momentum keeps no state and needs no temporaries.
std::optional<ModifiedStep> use_plain_sgd(const StepModel& model) {
  Allocations blocks = model.blocks;
  if (sum_of(blocks, is_state) == 0) return {};
  for (StepAllocation& block : blocks) {
    if (is_state(block) || is_optimizer_temporary(block)) block.bytes = 0;
  }
  return ModifiedStep{.blocks = std::move(blocks)};
}

bool is_loaded_state(const StepAllocation& block) { return is_state(block) && block.phase == Phase::setup; }

/// Adam with moments of 8 bits (bitsandbytes, torchao): a byte in place of each element, and a float32 scale of each 256;
/// of tensors below 4096 elements nothing changes. Its kernel is fused: no temporaries. State of a file keeps the type that it has
/// there.
std::optional<ModifiedStep> use_8bit_adam(const StepModel& model) {
  constexpr int64_t kLeastElements = 4096, kBlock = 256;
  Allocations blocks = model.blocks;
  if (!is_adam(model.optimizer) || sum_of(blocks, is_state) == 0) return {};
  const bool is_loaded = sum_of(blocks, is_loaded_state) * 2 > sum_of(blocks, is_state);
  const int64_t size = is_mostly_float32(blocks) ? 4 : 2;
  for (StepAllocation& block : blocks) {
    if (is_optimizer_temporary(block)) block.bytes = 0;
    const int64_t elements = block.bytes / size;
    if (is_state(block) && elements >= kLeastElements) block.bytes = elements + elements / kBlock * 4;
  }
  return ModifiedStep{.blocks = std::move(blocks),
                      .lines = {"pip install bitsandbytes", "import bitsandbytes",
                                fmt::format("optimizer = bitsandbytes.optim.{}8bit(model.parameters(), lr=…)",
                                            model.optimizer == "Adam" ? "Adam" : "AdamW")},
                      .at_least = is_loaded};
}

/// The optimizer's state and its step on the host (torchao's CPUOffloadOptimizer, DeepSpeed's ZeRO-Offload).
std::optional<ModifiedStep> offload_optimizer(const StepModel& model) {
  Allocations blocks = model.blocks;
  if (sum_of(blocks, is_state) == 0) return {};
  const int64_t bytes = sum_once(blocks, is_parameter);
  for (StepAllocation& block : blocks) {
    if (is_state(block) || is_optimizer_temporary(block)) block.bytes = 0;
  }
  return ModifiedStep{.blocks = std::move(blocks),
                      .lines = {"from torchao.optim import CPUOffloadOptimizer",
                                "optimizer = CPUOffloadOptimizer(model.parameters(), " + class_of(model) + ", lr=…)"},
                      .costs = with_unit(2 * bytes) + " over PCIe in each step: gradients there, parameters back",
                      .at_least = true};
}

/// FSDP2 over the fewest devices, a power of two, on which it may fit: of parameters, gradients and state each GPU holds its
/// share. What a layer gathers while it runs is left out.
std::optional<ModifiedStep> shard_over_devices(const StepModel& model) {
  constexpr int64_t kMaxShardingDevices = 64;
  if (model.sharded) return {};
  const Allocations& all = model.blocks;
  const int64_t trained = sum_once(all, is_gradient) + sum_once(all, is_state);
  if (!is_much(model, trained + sum_once(all, is_parameter))) return {};
  for (int64_t devices = 2; trained > 0 && devices <= kMaxShardingDevices; devices *= 2) {
    Allocations blocks = all;
    for (StepAllocation& block : blocks) {
      const bool shared = is_parameter(block) || is_gradient(block) || is_state(block) || is_optimizer_temporary(block);
      if (shared) block.bytes /= devices;
    }
    if (find_peak(blocks) > model.available_bytes) continue;
    const std::string count = std::to_string(devices);
    return ModifiedStep{
        .blocks = std::move(blocks),
        .variant = count,
        .label = "FSDP2 over " + count + " GPUs",
        .lines = {"from torch.distributed.fsdp import fully_shard",
                  "[fully_shard(layer) for layer in " + name_layers(all) + "]", "fully_shard(model)",
                  "torchrun --nproc-per-node " + count + " …"},
        .costs = count + " GPUs; each gathers " + with_unit(sum_once(all, is_parameter)) + " twice in each step",
        .at_least = true};
  }
  return {};
}

/// LoRA: the model is frozen, so that only adapters have gradients and state. Where these are little it is no answer, nor where they are
/// mostly of tables, which adapters of linear layers leave as they are.
std::optional<ModifiedStep> train_adapters(const StepModel& model) {
  Allocations blocks = model.blocks;
  const int64_t gradients = sum_of(blocks, is_gradient);
  const int64_t of_tables = sum_of(blocks, [](const StepAllocation& block) {
    return is_gradient(block) && block.made.node.starts_with("Embedding");
  });
  if (gradients == 0 || 2 * of_tables > gradients) return {};
  if (!is_much(model, sum_once(blocks, is_gradient) + sum_once(blocks, is_state))) return {};
  for (StepAllocation& block : blocks) {
    if (is_gradient(block) || is_state(block) || is_optimizer_temporary(block)) block.bytes = 0;
  }
  return ModifiedStep{.blocks = std::move(blocks), .at_least = true};
}

std::optional<ModuleSettings> where_gradients_are_kept(const ProgramFacts& program) {
  return unless(!program.profile.keeps_gradients);
}

std::optional<ModuleSettings> where_the_optimizer_is_too_large(const ProgramFacts& program) {
  return unless(!program.profile.has_optimizer || program.optimizer_peak_bytes <= program.available_bytes);
}

std::optional<ModuleSettings> where_adam_is(const ProgramFacts& program) {
  if (!program.profile.has_adam) return {};
  if (program.profile.has_8bit) return ModuleSettings{};
  return ModuleSettings{.missing = "neither bitsandbytes nor torchao is installed: pip install bitsandbytes"};
}

/// DistributedDataParallel(gradient_as_bucket_view=True): a gradient of a parameter is a view of the bucket that it is reduced in.
std::optional<ModifiedStep> use_bucket_views(const StepModel& model) {
  Allocations blocks = model.blocks;
  const auto is_bucket = [](const StepAllocation& block) {  // no node of backward made it
    return block.category == Category::gradient && block.made.op == "aten::empty" && block.made.node.empty();
  };
  if (std::ranges::none_of(blocks, is_bucket)) return {};
  const auto removed = std::ranges::remove_if(
      blocks, [&](const StepAllocation& block) { return block.category == Category::gradient && !is_bucket(block); });
  if (removed.empty()) return {};  // they lie there already
  blocks.erase(removed.begin(), removed.end());
  return ModifiedStep{.blocks = std::move(blocks)};
}

constexpr FixRow kStateFixes[] = {
    {.id = "set_to_none",
     .label = "zero_grad(set_to_none=True)",
     .group = "zero_grad",
     .has_module = true,
     .formula = "gradients live from their backward node to the end of the step only",
     .lines = "optimizer.zero_grad()  # its default is set_to_none=True",
     .predict = set_gradients_to_none,
     .configure = where_gradients_are_kept},
    {.id = "fused_optimizer",
     .label = "fused optimizer (fused=True)",
     .group = "optimizer",
     .has_module = true,
     .formula = "no temporaries in the optimizer's step",
     .combines = true,
     .in_plans = true,
     .predict = use_fused_optimizer,
     .configure = where_the_optimizer_is_too_large,
     .in_frameworks = {{"transformers", "TrainingArguments(…, optim=\"adamw_torch_fused\")"}}},
    {.id = "foreach_off",
     .label = "optimizer with foreach=False",
     .group = "optimizer",
     .has_module = true,
     .formula = "in the optimizer's step two temporaries of the largest parameter in place of all",
     .cost_text = "one call after the other for each parameter: slower optimizer steps",
     .predict = use_loop_optimizer,
     .configure = where_the_optimizer_is_too_large},
    {.id = "adam_8bit",
     .label = "8-bit Adam",
     .group = "optimizer",
     .cost = FixCost::less_precise,
     .has_module = true,
     .formula = "a byte per element of each moment, 4 bytes per 256 of them, no temporaries",
     .cost_text = "moments are rounded to 8 bits",
     .changes_numerics = true,
     .changes_training = true,
     .in_plans = true,
     .predict = use_8bit_adam,
     .configure = where_adam_is,
     .in_frameworks = {{"transformers", "TrainingArguments(…, optim=\"adamw_bnb_8bit\")  # pip install bitsandbytes"},
                       {"trl", "SFTConfig(…, optim=\"adamw_bnb_8bit\")  # pip install bitsandbytes"}}},
    {.id = "offload_optimizer",
     .label = "offload the optimizer to CPU",
     .group = "optimizer",
     .cost = FixCost::recomputation,
     .formula = "no optimizer state and no temporaries of it on the GPU",
     .predict = offload_optimizer,
     .in_frameworks = {{"deepspeed", R"("zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}})"}}},
    {.id = "fsdp",
     .label = "FSDP2",
     .group = "shards",
     .cost = FixCost::other_hardware,
     .formula = "parameters, gradients and optimizer state / GPUs",
     .predict = shard_over_devices,
     .in_frameworks = {{"transformers", "TrainingArguments(…, fsdp=\"full_shard\")"},
                       {"lightning", "Trainer(…, strategy=\"fsdp\")"},
                       {"deepspeed", R"("zero_optimization": {"stage": 3})"}}},
    {.id = "ddp_bucket_view",
     .label = "gradients that lie in DDP's buckets",
     .group = "grad",
     .formula = "no gradients but the buckets that they are reduced in",
     .lines = "model = DistributedDataParallel(model, …, gradient_as_bucket_view=True)",
     .predict = use_bucket_views,
     .in_frameworks = {{"accelerate",
                        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])"},
                       {"lightning", "Trainer(…, strategy=DDPStrategy(gradient_as_bucket_view=True))"}}},
    {.id = "sgd",
     .label = "SGD without momentum",
     .group = "optimizer",
     .cost = FixCost::other_training,
     .formula = "no optimizer state, no temporaries in the optimizer's step",
     .cost_text = "another optimizer: requires retuning the learning rate",
     .lines = "optimizer = torch.optim.SGD(model.parameters(), lr=…)",
     .changes_numerics = true,
     .changes_training = true,
     .predict = use_plain_sgd,
     .in_frameworks = {{"transformers", "TrainingArguments(…, optim=\"sgd\")"}}},
    {.id = "lora",
     .label = "LoRA, or frozen layers",
     .group = "adapters",
     .cost = FixCost::other_training,
     .formula = "no gradients and no optimizer state but those of adapters",
     .cost_text = "only adapters are trained",
     .lines = "pip install peft\n"
              "from peft import LoraConfig, get_peft_model\n"
              "model = get_peft_model(model, LoraConfig(r=16, target_modules=\"all-linear\"))",
     .changes_numerics = true,
     .changes_training = true,
     .predict = train_adapters,
     .in_frameworks = {{"trl", "SFTTrainer(…, peft_config=LoraConfig(r=16, target_modules=\"all-linear\"))"}}},
};

}  // namespace

std::span<const FixRow> list_state_fixes() { return kStateFixes; }

}  // namespace oomdiag
