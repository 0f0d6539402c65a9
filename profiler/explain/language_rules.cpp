#include <algorithm>
#include <array>
#include <set>

#include "profiler/explain/remedy_rules.h"
#include "profiler/explain/shape.h"

// What language models are large by: scores of attention, logits, sequences; and what autograd keeps, on the host.

namespace oomdiag {
namespace {

template <size_t N>
bool is_one_of(std::string_view op, const std::array<std::string_view, N>& list) {
  return std::find(list.begin(), list.end(), op) != list.end();
}

bool is_near(int64_t a, int64_t b) { return std::abs(a - b) <= kMiB; }

// float32 beside half precision, and either beside itself.
bool is_same_in_some_type(int64_t a, int64_t b) { return is_near(a, b) || is_near(2 * a, b) || is_near(a, 2 * b); }

/// A matrix of scores that softmax made: of each head, a row of all keys for each query.
struct Scores {
  std::string_view module{};
  int64_t bytes = 0;

  auto operator<=>(const Scores&) const = default;
};

std::set<Scores> find_scores(const Lives& blocks) {
  std::set<Scores> found;
  for (const BlockLife& block : blocks) {
    if (!block.is_of_step() || (block.made.op != "aten::softmax" && block.made.op != "aten::_softmax")) continue;
    const std::vector<int64_t> sizes = parse_shape(block.shape);
    const bool square = sizes.size() >= 3 && sizes.back() == sizes[sizes.size() - 2] && sizes.back() >= 64;
    if (square && block.phase == Phase::forward) found.insert({block.made.module, block.bytes});
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

bool is_score(const BlockLife& block, const std::set<Scores>& scores) {
  return block.is_of_step() && makes_scores(block.made.op) && block.category != Category::input &&
         std::any_of(scores.begin(), scores.end(), [&](const Scores& one) {
           return one.module == block.made.module && is_same_in_some_type(one.bytes, block.bytes);
         });
}

bool attends(const Lives& blocks) {
  return std::any_of(blocks.begin(), blocks.end(), [](const BlockLife& block) {
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
const BlockLife* find_probabilities(const Lives& blocks) {
  const BlockLife* largest = nullptr;
  for (const BlockLife& block : blocks) {
    const bool loss = block.is_of_step() && block.phase == Phase::forward && makes_loss(block.made.op);
    if (loss && (largest == nullptr || block.bytes > largest->bytes)) largest = &block;
  }
  return largest;
}

}  // namespace

/// F.scaled_dot_product_attention: no matrix of scores, neither in forward nor in backward.
std::optional<Changed> use_fused_attention(const Situation& situation) {
  Lives blocks = situation.lives.blocks;
  const std::set<Scores> scores = find_scores(blocks);
  if (scores.empty()) return {};
  for (BlockLife& block : blocks) {
    if (is_score(block, scores)) block.bytes = 0;
  }
  return Changed{.id = "sdpa",
                 .label = "fused attention (SDPA)",
                 .formula = "no matrix of scores, in forward and in backward",
                 .blocks = std::move(blocks),
                 .how = {"y = F.scaled_dot_product_attention(q, k, v, is_causal=…)",
                         "# transformers: from_pretrained(…, attn_implementation=\"sdpa\")"}};
}

/// The loss over an eighth of the rows at a time, each made again in backward: logits, probabilities and their gradients take
/// an eighth, and the gradient of the last layer's weight is added to eight times.
std::optional<Changed> use_chunked_cross_entropy(const Situation& situation) {
  constexpr int64_t kChunks = 8;
  Lives blocks = situation.lives.blocks;
  const BlockLife* probabilities = find_probabilities(blocks);
  if (probabilities == nullptr) return {};
  const int64_t bytes = probabilities->bytes;
  const uint32_t made = probabilities->born;
  for (BlockLife& block : blocks) {
    const bool near = block.is_of_step() && block.born + 64 > made && is_same_in_some_type(block.bytes, bytes);
    const bool forward = block.phase == Phase::forward && block.category != Category::input;
    if (near && (forward || block.phase == Phase::backward)) block.bytes /= kChunks;
  }
  return Changed{.id = "chunked_cross_entropy",
                 .label = "loss in chunks of the logits",
                 .formula = "logits, probabilities and their gradients / 8",
                 .blocks = std::move(blocks),
                 .how = {"# pip install liger-kernel: LigerFusedLinearCrossEntropyLoss, or by hand:",
                         "one = lambda x, y: F.cross_entropy(head(x), y, reduction=\"sum\")",
                         "loss = sum(checkpoint(one, x, y, use_reentrant=False)",
                         "           for x, y in zip(hidden.chunk(8), labels.chunk(8))) / len(labels)"},
                 .costs = "the last layer's forward runs twice",
                 .at_least = true};
}

/// Sequences of half the length: what follows the batch takes half, the scores of attention a quarter.
std::optional<Changed> halve_sequence(const Situation& situation) {
  const std::set<Scores> scores = find_scores(situation.lives.blocks);
  if (scores.empty() && !attends(situation.lives.blocks)) return {};
  Lives blocks = scale_batch(situation.lives.blocks, 1, 2);
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (is_score(situation.lives.blocks[b], scores)) blocks[b].bytes /= 2;
  }
  return Changed{.id = "half_sequence",
                 .label = "sequences of half the length",
                 .formula = "scaling/2, scores of attention/4",
                 .blocks = std::move(blocks),
                 .costs = "less context",
                 .changes_training = may_train(situation),
                 .at_least = true};
}

/// save_on_cpu: what autograd keeps waits on the host; on the card remains what is used at the moment.
std::optional<Changed> offload_activations(const Situation& situation) {
  Lives blocks = situation.lives.blocks;
  int64_t moved = 0;
  for (BlockLife& block : blocks) {
    if (block.category != Category::activation || block.phase != Phase::forward || !block.is_of_step()) continue;
    moved += block.bytes;
    block.died = std::min(block.died, block.born + 1);
  }
  if (moved == 0) return {};
  return Changed{.id = "offload_activations",
                 .label = "saved tensors on the host",
                 .formula = "what autograd keeps is on the card only while it is used",
                 .blocks = std::move(blocks),
                 .how = {"with torch.autograd.graph.save_on_cpu(pin_memory=True):", "    loss = …  # forward"},
                 .costs = text_of(2 * moved) + " over PCIe in each step",
                 .at_least = true};
}

}  // namespace oomdiag
