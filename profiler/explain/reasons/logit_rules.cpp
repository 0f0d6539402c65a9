#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"

// Rows of kReasons about vocabularies: logits, what a loss makes of them, and gradients of embeddings.

namespace oomdiag {
namespace {

bool is_loss_op(const Where& where) {
  return is_one_of(where.op, {"aten::cross_entropy_loss", "aten::log_softmax", "aten::_log_softmax", "aten::nll_loss"});
}

/// What works on images, volumes and sounds has no number for each word, though as many as there are rows of some table.
bool makes_images(const Where& where) { return contains_one_of(where.op, {"conv", "norm", "pool", "upsample"}); }

/// Tables of words, and what has a number for each of them.
struct Vocabularies {
  std::set<int64_t>
      words{};  ///< first sizes of tall parameters: shapes of outputs are not known before a backward pass
  std::set<int64_t> of_losses{};  ///< bytes of what a loss made of as many numbers as a smaller parameter has rows

  /// Whole rows, many of them; or as many numbers as a loss made.
  bool is_logits(const LiveBlock& block) const {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    // As many rows as words are what was computed for each word.
    const auto has = [&](int64_t count) { return std::find(shape.begin() + 1, shape.end(), count) != shape.end(); };
    const bool may_be_rows = shape.size() < 2 || std::ranges::any_of(words, has) || !of_losses.empty();
    return may_be_rows && !gathers(block.made) && !makes_images(block.made) && is_logits(block.requested_bytes);
  }
  bool is_logits(int64_t bytes) const {
    constexpr int64_t kFewRows = 64, kRounding = 512;
    const auto is_near = [](int64_t a, int64_t b) { return std::abs(a - b) < kRounding; };
    return std::ranges::any_of(
               words,
               [&](int64_t count) { return bytes >= kFewRows * count * 2 && bytes % (count * 2) < kRounding; }) ||
           std::ranges::any_of(of_losses, [&](int64_t size) {
             return is_near(bytes, size) || is_near(2 * bytes, size) || is_near(bytes, 2 * size);
           });
  }
  bool empty() const { return words.empty() && of_losses.empty(); }
};

/// Whether it makes no result of what a layer made, but numbers of its own, as counts of pairs of classes.
bool makes_of_nothing(const Where& where) {
  return is_one_of(where.op, {"aten::bincount", "aten::zeros", "aten::ones", "aten::full", "aten::eye", "aten::arange",
                              "aten::rand", "aten::randn", "aten::empty"});
}

Vocabularies find_vocabularies(const ReasonFacts& facts) {
  constexpr int64_t kManyWords = 8192, kManyClasses = 256;
  Vocabularies found;
  std::set<int64_t> rows;
  for (const LiveBlock& block : facts.device.state.blocks) {
    // What an op computed and then requires a gradient of its own is data.
    const bool is_of_model = !block.name.empty() || block.trained || block.made.op.empty() || is_copy(block.made.op) ||
                             makes_of_nothing(block.made);
    const bool is_weight = block.category == Category::parameter && is_of_model;
    const std::vector<int64_t> shape = is_weight ? parse_shape(block.shape) : std::vector<int64_t>();
    if (shape.empty()) continue;
    if (shape[0] >= kManyClasses) rows.insert(shape[0]);
    if (shape.size() == 2 && shape[0] >= kManyWords && shape[0] > 4 * shape[1]) found.words.insert(shape[0]);
  }
  for (const LiveBlock& block : facts.device.state.blocks) {
    const std::vector<int64_t> shape = is_data(block) ? parse_shape(block.shape) : std::vector<int64_t>();
    if (shape.empty()) continue;
    found.words.erase(shape.front());  // rows of a table, as of users, which all go through layers at once
    if (is_loss_op(block.made) && rows.contains(shape.back())) found.of_losses.insert(block.requested_bytes);
  }
  return found;
}

/// Of a layer that has a number for each word, or of the loss that takes them.
bool makes_logits(const Where& where) {
  constexpr std::array<std::string_view, 7> kProducts = {"aten::linear", "aten::matmul", "aten::addmm",  "aten::mm",
                                                         "aten::bmm",    "aten::einsum", "aten::baddbmm"};
  return is_loss_op(where) || is_one_of(where.op, kProducts) || is_one_of(where.inner, kProducts);
}

/// As many as the screen has room for.
std::vector<std::string> lines_for_logits(bool is_copied, bool in_graph, bool of_each_word, bool by_transformers) {
  constexpr size_t kMaxLines = 3;
  std::vector<std::string> lines = split_lines(find_fix("logits_in_parts")->lines);
  if (in_graph) {
    lines = {"losses = [checkpoint(loss_of_chunk, h, y, use_reentrant=False) for h, y in zip(h.chunk(8), y.chunk(8))]",
             "# or liger_kernel's fused linear cross-entropy; logits_to_keep=n, where few positions are used",
             "# what only metrics need of them, as an entropy: under torch.no_grad(), in parts"};
  }
  if (is_copied) {
    lines.insert(
        lines.begin(),
        "logits[:, :-1]  # a view: without .contiguous() or .clone(), or of the positions that are used alone");
  }
  if (of_each_word) {
    lines.insert(lines.begin(),
                 "log_p = torch.cat([l.gather(-1, y[:, None]) - l.logsumexp(-1, keepdim=True) for l, y in zip(logits, "
                 "labels)])  # of one word each: no log_softmax() of all");
  }
  if (by_transformers && (of_each_word || !in_graph))
    lines.insert(
        lines.begin(),
        "logits = model(ids, logits_to_keep=n).logits  # of the last n positions, where those before are not used");
  if (lines.size() > kMaxLines) lines.resize(kMaxLines);
  return lines;
}

/// Logarithms of all words by the program itself, which mostly reads those of one word at each position.
bool is_of_each_word(const Where& where) {
  return any_op(where, {"aten::log_softmax", "aten::_log_softmax"}) && where.op != "aten::cross_entropy_loss" &&
         where.module.empty();
}

/// "aten::contiguous at train.py:9".
std::string name_of_copy(const Where& where) { return fmt::format("{}{}", where.op, at(where)); }

}  // namespace

Found find_logits(const ReasonFacts& facts) {
  constexpr int64_t kManyPasses = 8;
  const Vocabularies vocabularies = find_vocabularies(facts);
  const auto are_logits = [&](const LiveBlock& block) {
    const bool is_of_model = is_of_models(block.category) || !module_of(facts.referrers.find(block)).empty();
    return !is_of_model && vocabularies.is_logits(block);
  };
  const Share logits = sum_blocks(facts, are_logits);
  const bool never_ran_backward = facts.device.attribution.backward_bytes == 0 && !expects_backward(facts);
  // Many passes, each of which keeps its logits: their graphs are the reason.
  if (never_ran_backward && logits.count >= kManyPasses && builds_graph(facts).value_or(false)) return {};
  const OutOfMemory* failed = failure(facts);
  const bool asks_for_more = failed != nullptr && failed->phase != Phase::optimizer &&
                             !makes_of_nothing(failed->where) && !gathers(failed->where) &&
                             !makes_images(failed->where) &&
                             (is_loss_op(failed->where) || vocabularies.is_logits(failed->requested_bytes));
  const int64_t bytes = logits.bytes + (asks_for_more ? requested_bytes(facts) : 0);
  if (logits.count == 0 && failed != nullptr && !makes_logits(failed->where)) return {};  // as many rows as words
  // Outside of any layer and of any loss it is the program's own product: scores of users and items, as a matrix of all pairs.
  const bool is_own_product = failed != nullptr && failed->where.module.empty() &&
                              any_op(failed->where, {"aten::matmul", "aten::mm", "aten::bmm", "aten::einsum"}) &&
                              failed->where.op != "aten::linear";
  if (logits.count == 0 && is_own_product && !builds_graph(facts).value_or(false)) return {};
  if (vocabularies.empty() || !is_large(facts, bytes, 0.4)) return {};
  const Where made = logits.largest != nullptr ? logits.made() : failed_in(facts);
  const std::string words =
      vocabularies.words.empty() ? "many classes" : fmt::format("a vocabulary of {}", *vocabularies.words.rbegin());
  const auto is_plain_copy = [](const Where& where) { return any_op(where, {"aten::contiguous", "aten::clone"}); };
  const Share plain =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_plain_copy(block.made) && are_logits(block); });
  const bool asks_for_copy = failed != nullptr && is_plain_copy(failed->where);
  const bool is_copied = plain.count > 0 || asks_for_copy;
  const std::string text = fmt::format(
      "logits over {}{}, and copies of them{}: {}", words, at(made),
      is_copied ? fmt::format(", as by {}", asks_for_copy ? name_of_copy(failed->where) : name_of_copy(plain.made()))
                : "",
      with_unit(bytes));
  const bool in_graph = builds_graph(facts).value_or(learns(facts));
  return Reason{.text = text,
                .bytes = bytes,
                .fix = in_graph ? "loss_in_chunks" : "logits_in_parts",
                .how = lines_for_logits(is_copied, in_graph, asks_for_more && is_of_each_word(failed->where),
                                        contains(made.inner_source, "transformers/"))};
}

Found find_embedding_gradients(const ReasonFacts& facts) {
  const auto is_embedding = [](const Where& where) {
    return is_one_of(where.node, {"EmbeddingBackward0", "EmbeddingBagBackward0"});
  };
  const Share gradients = sum_blocks(facts, [&](const LiveBlock& block) { return is_embedding(block.made); });
  const OutOfMemory* failed = failure(facts);
  const int64_t bytes =
      gradients.bytes + (failed != nullptr && is_embedding(failed->where) ? failed->requested_bytes : 0);
  if (!is_large(facts, bytes, 0.2)) return {};
  const Where where = gradients.largest != nullptr ? gradients.made() : failed_in(facts);
  return Reason{.text = fmt::format("dense gradients of an embedding{}: {}, as large as the tables, for a few rows",
                                    at(where), with_unit(bytes)),
                .bytes = bytes,
                .fix = "sparse_embedding",
                .how = {"nn.Embedding(rows, width, sparse=True)  # with torch.optim.SparseAdam or SGD"}};
}

}  // namespace oomdiag
