#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/fixes.h"

// What a fix is called in a framework that owns the training loop: there nobody can write `loss.backward()` in another way, but
// there is an argument for it. Names are those of the frameworks' documentation.

namespace oomdiag {

/// A part of a path that only this framework's own code has. The first that the stack has is the framework: what drives the loop
/// stands before what it is made of.
struct FrameworkPath {
  std::string_view path, framework;
};

inline constexpr FrameworkPath kFrameworkPaths[] = {
    {"trl/trainer/", "trl"},
    {"transformers/trainer.py", "transformers"},
    {"lightning/pytorch/", "lightning"},
    {"pytorch_lightning/", "lightning"},
    {"ultralytics/", "ultralytics"},
    {"deepspeed/runtime/", "deepspeed"},
    {"diffusers/", "diffusers"},
    {"accelerate/", "accelerate"},
    {"torch_geometric/", "torch_geometric"},
    {"monai/", "monai"},
    {"timm/", "timm"},
    {"captum/", "captum"},
    {"torchdiffeq/", "torchdiffeq"},
};

struct FrameworkLine {
  std::string_view framework, fix, lines;
};

// {batch} is the batch size with the fix.
inline constexpr FrameworkLine kFrameworkLines[] = {
    {"transformers", "checkpoint", "TrainingArguments(…, gradient_checkpointing=True)"},
    {"transformers", "accumulate",
     "TrainingArguments(…, per_device_train_batch_size={batch}, gradient_accumulation_steps=2)"},
    {"transformers", "half_batch", "TrainingArguments(…, per_device_train_batch_size={batch})"},
    {"transformers", "batch", "TrainingArguments(…, per_device_train_batch_size={batch})"},
    {"transformers", "adam_8bit", "TrainingArguments(…, optim=\"adamw_bnb_8bit\")  # pip install bitsandbytes"},
    {"transformers", "autocast_bf16", "TrainingArguments(…, bf16=True)"},
    {"transformers", "autocast_fp16", "TrainingArguments(…, fp16=True)"},
    {"transformers", "fused_optimizer", "TrainingArguments(…, optim=\"adamw_torch_fused\")"},
    {"transformers", "fused_or_single", "TrainingArguments(…, optim=\"adamw_torch_fused\")"},
    {"transformers", "sgd", "TrainingArguments(…, optim=\"sgd\")"},
    {"transformers", "chunked_cross_entropy",
     "TrainingArguments(…, use_liger_kernel=True)  # pip install liger-kernel"},
    {"transformers", "loss_in_chunks", "TrainingArguments(…, use_liger_kernel=True)  # pip install liger-kernel"},
    {"transformers", "results_to_host",
     "TrainingArguments(…, eval_accumulation_steps=1)\n"
     "Trainer(…, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))"},
    {"transformers", "fsdp", "TrainingArguments(…, fsdp=\"full_shard\")"},
    {"transformers", "sdpa", "AutoModel.from_pretrained(…, attn_implementation=\"sdpa\")"},
    {"transformers", "fused_attention", "AutoModel.from_pretrained(…, attn_implementation=\"sdpa\")"},
    {"trl", "results_to_host", "SFTConfig(…, eval_accumulation_steps=1)"},
    {"trl", "checkpoint", "SFTConfig(…, gradient_checkpointing=True)"},
    {"trl", "accumulate", "SFTConfig(…, per_device_train_batch_size={batch}, gradient_accumulation_steps=2)"},
    {"trl", "half_batch", "SFTConfig(…, per_device_train_batch_size={batch})"},
    {"trl", "batch", "SFTConfig(…, per_device_train_batch_size={batch})"},
    {"trl", "half_sequence", "SFTConfig(…, max_length=…)"},
    {"trl", "adam_8bit", "SFTConfig(…, optim=\"adamw_bnb_8bit\")  # pip install bitsandbytes"},
    {"trl", "autocast_bf16", "SFTConfig(…, bf16=True)"},
    {"trl", "autocast_fp16", "SFTConfig(…, fp16=True)"},
    {"trl", "chunked_cross_entropy", "SFTConfig(…, use_liger_kernel=True)  # pip install liger-kernel"},
    {"trl", "loss_in_chunks", "SFTConfig(…, use_liger_kernel=True)  # pip install liger-kernel"},
    {"trl", "lora", "SFTTrainer(…, peft_config=LoraConfig(r=16, target_modules=\"all-linear\"))"},
    {"accelerate", "accumulate",
     "accelerator = Accelerator(gradient_accumulation_steps=2)  # and DataLoader(…, batch_size={batch})\n"
     "with accelerator.accumulate(model):  # around the body of the loop"},
    {"accelerate", "backward_of_each_pass",
     "accelerator.backward(loss)  # in the loop: gradients add up, as of the sum"},
    {"accelerate", "autocast_bf16", "accelerator = Accelerator(mixed_precision=\"bf16\")"},
    {"accelerate", "autocast_fp16", "accelerator = Accelerator(mixed_precision=\"fp16\")"},
    {"lightning", "accumulate", "Trainer(…, accumulate_grad_batches=2)  # and DataLoader(…, batch_size={batch})"},
    {"lightning", "autocast_bf16", "Trainer(…, precision=\"bf16-mixed\")"},
    {"lightning", "autocast_fp16", "Trainer(…, precision=\"16-mixed\")"},
    {"lightning", "fsdp", "Trainer(…, strategy=\"fsdp\")"},
    {"diffusers", "checkpoint", "unet.enable_gradient_checkpointing()  # or transformer., vae."},
    {"diffusers", "split_batch",
     "pipe.vae.enable_slicing()  # one image at a time; pipe.vae.enable_tiling(): tiles of it"},
    {"diffusers", "drop_models", "pipe.enable_model_cpu_offload()"},
    {"ultralytics", "half_batch", "model.train(…, batch={batch})"},
    {"ultralytics", "batch", "model.train(…, batch={batch})"},
    {"ultralytics", "autocast_fp16", "model.train(…, amp=True)"},
    {"torch_geometric", "half_batch",
     "NeighborLoader(data, num_neighbors=[10, 10], batch_size={batch})  # a part of the graph at a time"},
    {"torch_geometric", "split_batch",
     "NeighborLoader(data, num_neighbors=[-1], batch_size=1024)  # a part of the graph at a time"},
    {"monai", "smaller_result",
     "sliding_window_inference(…, sw_device=\"cuda\", device=\"cpu\")  # the result on the host"},
    {"timm", "checkpoint", "model.set_grad_checkpointing()"},
    {"torchdiffeq", "checkpoint_each_pass",
     "from torchdiffeq import odeint_adjoint as odeint  # backward solves once more, and nothing is kept of each "
     "evaluation"},
    {"captum", "split_batch",
     "attributions = method.attribute(…, internal_batch_size=8)  # of n_steps or n_samples so many at a time"},
    {"captum", "fewer_rows",
     "attributions = method.attribute(…, internal_batch_size=8)  # of n_steps or n_samples so many at a time"},
    {"captum", "half_batch",
     "attributions = method.attribute(…, internal_batch_size=8)  # of n_steps or n_samples so many at a time"},
    {"deepspeed", "accumulate", R"("train_micro_batch_size_per_gpu": {batch}, "gradient_accumulation_steps": 2)"},
    {"deepspeed", "half_batch", R"("train_micro_batch_size_per_gpu": {batch})"},
    {"deepspeed", "batch", R"("train_micro_batch_size_per_gpu": {batch})"},
    {"deepspeed", "autocast_bf16", R"("bf16": {"enabled": true})"},
    {"deepspeed", "autocast_fp16", R"("fp16": {"enabled": true})"},
    {"deepspeed", "offload_optimizer", R"("zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}})"},
    {"deepspeed", "fsdp", R"("zero_optimization": {"stage": 3})"},
};

/// The training framework that a stack names, "transformers" for "…/transformers/trainer.py:3749 in training_step"; empty: none.
/// `stack` are calls, one per line of text.
inline std::string_view find_framework(std::string_view stack) {
  const auto named = std::ranges::find_if(
      kFrameworkPaths, [&](const FrameworkPath& one) { return stack.find(one.path) != std::string_view::npos; });
  return named == std::end(kFrameworkPaths) ? std::string_view() : named->framework;
}

/// The lines by which a program of this framework gets the fix: arguments of its own classes. Nothing where the framework has
/// none, so that those of plain PyTorch hold. `batch` is that of the fix; where it is not known, "…" stands for it.
inline std::optional<std::vector<std::string>> lines_in_framework(std::string_view framework, std::string_view fix,
                                                                  std::optional<int64_t> batch) {
  const FixRow* const row = find_fix(fix);
  const std::string_view id = row == nullptr ? fix : row->id;
  const auto found = std::ranges::find_if(
      kFrameworkLines, [&](const FrameworkLine& one) { return one.framework == framework && one.fix == id; });
  if (found == std::end(kFrameworkLines)) return std::nullopt;
  constexpr std::string_view kBatch = "{batch}";
  std::string lines(found->lines);
  if (const size_t at = lines.find(kBatch); at != lines.npos) {
    lines.replace(at, kBatch.size(), batch ? std::to_string(*batch) : "…");
  }
  return split_lines(lines);
}

}  // namespace oomdiag
