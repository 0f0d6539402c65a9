#include <algorithm>
#include <array>
#include <set>

#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/shape.h"
#include "profiler/fold_indices.h"
#include "profiler/one_of.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"

// What language models are large by: scores of attention, logits, sequences.

namespace oomdiag {
namespace {

bool is_near(int64_t a, int64_t b) { return std::abs(a - b) <= kMiB; }

// float32 beside half precision, and either beside itself.
bool is_same_in_some_type(int64_t a, int64_t b) { return is_near(a, b) || is_near(2 * a, b) || is_near(a, 2 * b); }

/// A matrix of scores that softmax made: of each head, a row of all keys for each query. Layers that are alike make the same
/// ones: where a step was cut short, softmax of the last one was not reached.
struct Scores {
  std::string module{};  ///< its indices folded
  int64_t bytes = 0;

  auto operator<=>(const Scores&) const = default;
};

bool is_product(std::string_view op) {
  return is_one_of(op, {"aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum"});
}

/// Whether a product of the step made as many elements in the same module; classes of an image's pixels a convolution makes.
bool has_product(const Allocations& blocks, const StepAllocation& probabilities) {
  const std::string module = fold_indices(probabilities.made.module);
  return std::ranges::any_of(blocks, [&](const StepAllocation& block) {
    return block.is_of_step() && is_product(block.made.op) && fold_indices(block.made.module) == module &&
           is_same_in_some_type(block.bytes, probabilities.bytes);
  });
}

std::set<Scores> find_scores(const Allocations& blocks) {
  std::set<Scores> found;
  for (const StepAllocation& block : blocks) {
    if (!block.is_of_step() || (block.made.op != "aten::softmax" && block.made.op != "aten::_softmax")) continue;
    const std::vector<int64_t> sizes = parse_shape(block.shape);
    const bool square = sizes.size() >= 3 && sizes.back() == sizes[sizes.size() - 2] && sizes.back() >= 64;
    if (square && block.phase == Phase::forward && has_product(blocks, block))
      found.insert({fold_indices(block.made.module), block.bytes});
  }
  return found;
}

bool makes_scores(std::string_view op) {
  constexpr std::array<std::string_view, 17> kOps = {
      "aten::softmax", "aten::_softmax",     "aten::matmul", "aten::bmm",  "aten::baddbmm", "aten::mul",
      "aten::div",     "aten::masked_fill",  "aten::where",  "aten::add",  "aten::dropout", "aten::to",
      "aten::einsum",  "aten::masked_fill_", "aten::mul_",   "aten::div_", "aten::add_"};
  return is_one_of(op, kOps);
}

bool is_score(const StepAllocation& block, const std::set<Scores>& scores) {
  return block.is_of_step() && makes_scores(block.made.op) && block.category != Category::input &&
         std::any_of(scores.begin(), scores.end(), [&](const Scores& one) {
           return one.module == fold_indices(block.made.module) && is_same_in_some_type(one.bytes, block.bytes);
         });
}

bool attends(const Allocations& blocks) {
  return std::any_of(blocks.begin(), blocks.end(), [](const StepAllocation& block) {
    return block.made.op.find("scaled_dot_product") != std::string_view::npos ||
           block.made.op.find("lstm") != std::string_view::npos || block.made.op.find("gru") != std::string_view::npos;
  });
}

bool makes_loss(std::string_view op) {
  constexpr std::array<std::string_view, 4> kOps = {"aten::cross_entropy_loss", "aten::log_softmax", "aten::nll_loss",
                                                    "aten::nll_loss_nd"};
  return is_one_of(op, kOps);
}

// The probabilities of all classes, which the loss saves: nothing for a few classes.
const StepAllocation* find_probabilities(const Allocations& blocks) {
  const StepAllocation* largest = nullptr;
  for (const StepAllocation& block : blocks) {
    const bool loss = block.is_of_step() && block.phase == Phase::forward && makes_loss(block.made.op);
    if (loss && (largest == nullptr || block.bytes > largest->bytes)) largest = &block;
  }
  return largest;
}

/// F.scaled_dot_product_attention: no matrix of scores, neither in forward nor in backward.
std::optional<ModifiedStep> use_fused_attention(const StepModel& model) {
  Allocations blocks = model.blocks;
  const std::set<Scores> scores = find_scores(blocks);
  if (scores.empty()) return {};
  for (StepAllocation& block : blocks) {
    if (is_score(block, scores)) block.bytes = 0;
  }
  return ModifiedStep{.blocks = std::move(blocks)};
}

/// The loss over an eighth of the rows at a time, each recomputed in backward: logits, probabilities and their gradients take
/// an eighth, and the gradient of the last layer's weight is added to eight times.
std::optional<ModifiedStep> use_chunked_cross_entropy(const StepModel& model) {
  constexpr int64_t kChunks = 8;
  if (is_without_backward(model)) return {};
  Allocations blocks = model.blocks;
  const StepAllocation* probabilities = find_probabilities(blocks);
  const bool is_of_pixels = probabilities != nullptr && parse_shape(probabilities->shape).size() > 3;
  if (probabilities == nullptr || is_of_pixels) return {};
  const int64_t bytes = probabilities->bytes;
  const uint32_t made = probabilities->born;
  for (StepAllocation& block : blocks) {
    const bool near = block.is_of_step() && block.born + 64 > made && is_same_in_some_type(block.bytes, bytes);
    const bool forward = block.phase == Phase::forward && block.category != Category::input;
    if (near && (forward || block.phase == Phase::backward)) block.bytes /= kChunks;
  }
  return ModifiedStep{.blocks = std::move(blocks), .at_least = true};
}

/// Sequences of half the length: what follows the batch takes half, the scores of attention a quarter.
std::optional<ModifiedStep> halve_sequence(const StepModel& model) {
  const std::set<Scores> scores = find_scores(model.blocks);
  if (scores.empty() && !attends(model.blocks)) return {};
  Allocations blocks = scale_batch(model.blocks, 1, 2);
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (is_score(model.blocks[b], scores)) blocks[b].bytes /= 2;
  }
  return ModifiedStep{.blocks = std::move(blocks), .at_least = true};
}

std::optional<ModuleSettings> where_logits_are_many(const ProgramFacts& program) {
  constexpr int64_t kManyLogits = 1 << 22;  // as in chunked_loss.py
  return unless(!program.profile.has_root || program.profile.logits < kManyLogits || !program.runs_backward);
}

constexpr FixRow kLanguageFixes[] = {
    {.id = "sdpa",
     .label = "fused attention (SDPA)",
     .group = "attention",
     .formula = "no matrix of scores, in forward and in backward",
     .lines = "y = F.scaled_dot_product_attention(q, k, v, is_causal=…)\n"
              "# transformers: from_pretrained(…, attn_implementation=\"sdpa\")",
     .combines = true,
     .predict = use_fused_attention,
     .in_frameworks = {{"transformers", "AutoModel.from_pretrained(…, attn_implementation=\"sdpa\")"}}},
    {.id = "chunked_cross_entropy",
     .label = "cross-entropy in chunks",
     .group = "loss",
     .formula = "logits, probabilities and their gradients / 8",
     .cost_text = "the last layer's forward runs twice",
     .lines = "# pip install liger-kernel: LigerFusedLinearCrossEntropyLoss, or by hand:\n"
              "loss_of_chunk = lambda h, y: F.cross_entropy(head(h), y, reduction=\"sum\")\n"
              "loss = sum(torch.utils.checkpoint.checkpoint(loss_of_chunk, h, y, use_reentrant=False)\n"
              "           for h, y in zip(hidden.chunk(8), labels.chunk(8))) / len(labels)",
     .predict = use_chunked_cross_entropy,
     .in_frameworks = {{"transformers", "TrainingArguments(…, use_liger_kernel=True)  # pip install liger-kernel"},
                       {"trl", "SFTConfig(…, use_liger_kernel=True)  # pip install liger-kernel"}}},
    {.id = "chunked_loss",  // what can be done to a program that has made its logits already
     .label = "loss in chunks of the logits",
     .group = "loss",
     .has_module = true,
     .in_plans = true,
     .configure = where_logits_are_many},
    {.id = "half_sequence",
     .label = "sequences of half the length",
     .group = "sequence",
     .cost = FixCost::other_training,
     .formula = "scaling/2, scores of attention/4",
     .cost_text = "less context",
     .changes_numerics = true,
     .changes_training = true,
     .predict = halve_sequence,
     .in_frameworks = {{"trl", "SFTConfig(…, max_length=…)"}}},
};

}  // namespace

std::span<const FixRow> list_language_fixes() { return kLanguageFixes; }

}  // namespace oomdiag
