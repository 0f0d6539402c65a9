#include "profiler/explain/fixes.h"

#include <algorithm>

#include "profiler/explain/fix_rules.h"

namespace oomdiag {
namespace {

// One row per fix: `explain` predicts it, `fix` applies its module and measures it. A fix is added by a row here, its rule in one
// of the files of fix_rules.h, and its module in extension/python/fixes/oomdiag_fixes/.
constexpr FixRow kFixes[] = {
    {.id = "expandable_segments",
     .label = "expandable_segments:True",
     .group = "segments",
     .formula = "the same bytes, packed into whole pages",
     .lines = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
     .predict = use_expandable_segments},
    {.id = "stop_growth",
     .label = "stop keeping tensors across steps",
     .group = "growth",
     .formula = "peak − bytes grown since the first step",
     .cures_growth = true,
     .predict = stop_growth},
    {.id = "no_grad",
     .label = "torch.no_grad(), as nothing runs backward",
     .group = "grad",
     .module = "no_grad",
     .formula = "a tensor dies when the module that takes it returns",
     .lines = "with torch.no_grad():",
     .predict = use_no_grad},
    {.id = "set_to_none",
     .label = "zero_grad(set_to_none=True)",
     .group = "zero_grad",
     .module = "set_to_none",
     .formula = "gradients live from their backward node to the end of the step only",
     .lines = "optimizer.zero_grad()  # its default is set_to_none=True",
     .predict = set_gradients_to_none},
    {.id = "drop_outputs",
     .label = "del outputs before backward",
     .group = "outputs",
     .formula = "outputs that autograd does not keep end where backward begins",
     .predict = drop_outputs},
    {.id = "relu_in_place",
     .label = "ReLU in place",
     .group = "relu",
     .module = "relu_in_place",
     .formula = "a ReLU whose input nobody keeps writes into it: one block in place of two",
     .lines = "torch.nn.ReLU(inplace=True)",
     .combines = true,
     .predict = use_relu_in_place},
    {.id = "fused_optimizer",
     .label = "fused optimizer (fused=True)",
     .group = "optimizer",
     .module = "fused_optimizer",
     .formula = "no temporaries in the optimizer's step",
     .combines = true,
     .predict = use_fused_optimizer},
    {.id = "foreach_off",
     .label = "optimizer with foreach=False",
     .group = "optimizer",
     .module = "foreach_off",
     .formula = "in the optimizer's step two temporaries of the largest parameter in place of all",
     .cost_text = "one call after the other for each parameter: slower optimizer steps",
     .predict = use_loop_optimizer},
    {.id = "sdpa",
     .label = "fused attention (SDPA)",
     .group = "attention",
     .formula = "no matrix of scores, in forward and in backward",
     .lines = "y = F.scaled_dot_product_attention(q, k, v, is_causal=…)\n"
              "# transformers: from_pretrained(…, attn_implementation=\"sdpa\")",
     .combines = true,
     .predict = use_fused_attention},
    {.id = "chunked_cross_entropy",
     .label = "cross-entropy in chunks",
     .group = "loss",
     .module = "chunked_cross_entropy",
     .formula = "logits, probabilities and their gradients / 8",
     .cost_text = "the last layer's forward runs twice",
     .lines = "# pip install liger-kernel: LigerFusedLinearCrossEntropyLoss, or by hand:\n"
              "one = lambda x, y: F.cross_entropy(head(x), y, reduction=\"sum\")\n"
              "loss = sum(checkpoint(one, x, y, use_reentrant=False)\n"
              "           for x, y in zip(hidden.chunk(8), labels.chunk(8))) / len(labels)",
     .predict = use_chunked_cross_entropy},
    {.id = "channels_last", .label = "channels_last", .group = "layout", .module = "channels_last"},
    {.id = "autocast_bf16",
     .label = "bf16 autocast",
     .group = "autocast",
     .cost = FixCost::less_precise,
     .module = "autocast_bf16",
     .formula = kAutocastFormula,
     .cost_text = "matrix products and convolutions round to 16 bits",
     .changes_numerics = true,
     .combines = true,
     .predict = use_bf16_autocast},
    {.id = "autocast_fp16",
     .label = "fp16 autocast, loss scaled",
     .group = "autocast",
     .cost = FixCost::less_precise,
     .module = "autocast_fp16",
     .formula = kAutocastFormula,
     .cost_text = "matrix products and convolutions round to 16 bits",
     .changes_numerics = true,
     .combines = true,
     .predict = use_fp16_autocast},
    {.id = "adam_8bit",
     .label = "8-bit Adam",
     .group = "optimizer",
     .cost = FixCost::less_precise,
     .module = "adam_8bit",
     .formula = "a byte per element of each moment, 4 bytes per 256 of them, no temporaries",
     .cost_text = "moments are rounded to 8 bits",
     .lines = "pip install bitsandbytes\nbitsandbytes.optim.AdamW8bit(model.parameters(), lr=…)",
     .changes_numerics = true,
     .changes_training = true,
     .predict = use_8bit_adam},
    {.id = "checkpoint",
     .label = "activation checkpointing",
     .group = "checkpoint",
     .cost = FixCost::recomputation,
     .module = "checkpoint",
     .formula = "what only the module saves is freed in forward, and recomputed when its backward begins",
     .combines = true,
     .predict = checkpoint_modules},
    {.id = "offload_activations",
     .label = "offload activations to CPU",
     .group = "checkpoint",
     .cost = FixCost::recomputation,
     .module = "offload_activations",
     .formula = "what autograd keeps is on the GPU only while it is used",
     .lines = "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    loss = …  # forward",
     .predict = offload_activations},
    {.id = "offload_optimizer",
     .label = "offload the optimizer to CPU",
     .group = "optimizer",
     .cost = FixCost::recomputation,
     .formula = "no optimizer state and no temporaries of it on the GPU",
     .predict = offload_optimizer},
    {.id = "accumulate",
     .label = "gradient accumulation, 2 micro-batches",
     .group = "batch",
     .cost = FixCost::smaller_batches,
     .module = "accumulate",
     .formula = "peak over the step of fixed + scaling/2, gradients alive all the time",
     .cost_text = "two passes per step of half the size; batch norms see half the batch",
     .lines = "for x, y in zip(inputs.chunk(2), labels.chunk(2)):\n"
              "    (loss_of(model(x), y) / 2).backward()\n"
              "optimizer.step(); optimizer.zero_grad()",
     .combines = true,
     .predict = accumulate},
    {.id = "half_batch",
     .label = "half the batch",
     .group = "batch",
     .cost = FixCost::smaller_batches,
     .formula = "peak over the step of fixed + scaling/2",
     .changes_numerics = true,
     .changes_training = true,
     .predict = halve_batch},
    {.id = "batch",
     .label = "a smaller batch",
     .group = "batch",
     .cost = FixCost::smaller_batches,
     .formula = "largest b with peak over the step of fixed + scaling ∙ b/batch ≤ available memory",
     .changes_numerics = true,
     .changes_training = true,
     .predict = fit_batch},
    {.id = "fsdp",
     .label = "FSDP2",
     .group = "shards",
     .cost = FixCost::other_hardware,
     .formula = "parameters, gradients and optimizer state / GPUs",
     .predict = shard_over_devices},
    {.id = "half_sequence",
     .label = "sequences of half the length",
     .group = "sequence",
     .cost = FixCost::other_training,
     .formula = "scaling/2, scores of attention/4",
     .cost_text = "less context",
     .changes_numerics = true,
     .changes_training = true,
     .predict = halve_sequence},
    {.id = "sgd",
     .label = "SGD without momentum",
     .group = "optimizer",
     .cost = FixCost::other_training,
     .formula = "no optimizer state, no temporaries in the optimizer's step",
     .cost_text = "another optimizer: requires retuning the learning rate",
     .lines = "torch.optim.SGD(model.parameters(), lr=…)",
     .changes_numerics = true,
     .changes_training = true,
     .predict = use_plain_sgd},
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
     .predict = train_adapters},
};

/// "batch" of "batch_6012"; the text itself where no number ends it.
std::string_view without_number(std::string_view id) {
  const size_t digits = id.find_last_not_of("0123456789") + 1;
  const bool numbered = digits > 1 && digits < id.size() && id[digits - 1] == '_';
  return numbered ? id.substr(0, digits - 1) : id;
}

}  // namespace

std::span<const FixRow> list_fixes() { return kFixes; }

const FixRow* find_fix(std::string_view id) {
  for (const std::string_view name : {id, without_number(id)}) {
    const auto row = std::ranges::find(kFixes, name, &FixRow::id);
    if (row != std::end(kFixes)) return row;
  }
  return nullptr;
}

std::vector<std::string> split_lines(std::string_view lines) {
  std::vector<std::string> list;
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    list.emplace_back(lines.substr(0, end));
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
  return list;
}

}  // namespace oomdiag
