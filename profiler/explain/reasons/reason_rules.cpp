#include "profiler/explain/reasons/reason_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/one_of.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons that look for their evidence among the live blocks and at the request that failed. Each wants it to be a
// large part of both: a reason that is wrong costs more trust than one that is missing.

namespace oomdiag {
namespace {

bool is_loss_op(const Where& where) {
  return is_one_of(where.op, {"aten::cross_entropy_loss", "aten::log_softmax", "aten::_log_softmax", "aten::nll_loss"});
}

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
    return may_be_rows && !gathers(block.made) && is_logits(block.requested_bytes);
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
    const std::vector<int64_t> shape = is_loss_op(block.made) ? parse_shape(block.shape) : std::vector<int64_t>();
    if (!shape.empty() && rows.contains(shape.back())) found.of_losses.insert(block.requested_bytes);
  }
  return found;
}

/// Of a layer that has a number for each word, or of the loss that takes them.
bool makes_logits(const Where& where) {
  constexpr std::array<std::string_view, 7> kProducts = {"aten::linear", "aten::matmul", "aten::addmm",  "aten::mm",
                                                         "aten::bmm",    "aten::einsum", "aten::baddbmm"};
  return is_loss_op(where) || is_one_of(where.op, kProducts) || is_one_of(where.inner, kProducts);
}

// Graphs that are captured one after the other share it: what a smaller one needed serves no larger one.
Found names_one_pool(int64_t bytes, const std::vector<int64_t>& segments) {
  constexpr size_t kSeveral = 4;
  if (segments.size() < kSeveral) return {};
  return Reason{
      .text = fmt::format("the private memory pool of CUDA graphs holds {} in {} segments of up to {}: a graph reuses "
                          "what those captured before it needed only where it needs no more",
                          with_unit(bytes), segments.size(), with_unit(std::ranges::max(segments))),
      .bytes = bytes,
      .fix = "one_graph_pool",
      .how = {"for batch in sorted(batch_sizes, reverse=True): capture(batch)  # the largest first; and fewer sizes"}};
}

}  // namespace

Found find_one_checkpoint(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  const Share saved = sum_category(facts, Category::activation);
  const bool is_of_segments = failed->phase == Phase::forward && contains(failed->stack, "checkpoint_sequential");
  if (is_of_segments && is_large(facts, saved.bytes, 0.5)) {
    return Reason{.text = fmt::format("checkpoint_sequential does not checkpoint its last segment, which holds {}: too "
                                      "few segments",
                                      with_unit(saved.bytes)),
                  .bytes = saved.bytes,
                  .fix = "finer_checkpoints",
                  .how = {"torch.utils.checkpoint.checkpoint_sequential(layers, len(layers), x, use_reentrant=False)"}};
  }
  if (facts.device.packed_tensors == 0) return {};
  const Share again = sum_blocks(facts, [](const LiveBlock& block) {
    return block.phase == Phase::backward && block.category == Category::activation;
  });
  if (!is_large(facts, again.bytes, 0.5)) return {};
  return Reason{
      .text = fmt::format("one checkpoint around too much: its recomputation holds {} at once", with_unit(again.bytes)),
      .bytes = again.bytes,
      .fix = "finer_checkpoints",
      .how = {"for layer in layers: x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)"}};
}

// Models check their flag where they call their layers: of a flag that was set on another module, or is looked at in training mode only,
// nobody hears.
Found find_checkpoints_without_effect(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !failed->asks_for_checkpoints) return {};
  Share saved = sum_category(facts, Category::activation);
  int64_t in_graph = 0;  // of a forward pass that is under way not all of its nodes are known
  for (const StepAllocation& block : facts.device.step_allocations.blocks)
    in_graph += is_of_forward_graph(block) && block.died == StepAllocation::kNever ? block.bytes : 0;
  saved.bytes = std::max(saved.bytes, in_graph);
  if (runs_checkpoints(facts) || !is_large(facts, saved.bytes)) return {};
  const std::string_view mode = failed->modules_evaluate ? ", and the model is in evaluation mode" : "";
  return Reason{
      .text = fmt::format("checkpointing has no effect: a layer's attribute asks for it{}, but nothing is "
                          "checkpointed, and {} of activations are kept{}",
                          mode, with_unit(saved.bytes), at(saved.made())),
      .bytes = saved.bytes / 10 * 7,
      .fix = "checkpoints_on",
      .how = {
          failed->modules_evaluate
              ? "model.train()  # where its forward() checkpoints in training mode only"
              : "model.gradient_checkpointing_enable()  # or the attribute of the module whose forward() reads it"}};
}

// AccumulateGrad takes the gradient that it is given, unless something else refers to it: then it makes a copy.
Found find_copied_gradient(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !contains(failed->where.node, "AccumulateGrad")) return {};
  const bool is_copy = any_op(failed->where, {"aten::new_empty_strided", "aten::empty_strided", "aten::clone"});
  if (!is_copy || !is_large(facts, failed->requested_bytes, 0.2)) return {};
  return Reason{.text = fmt::format(
                    "a gradient of {} is copied as it is put into .grad, as something else refers to it too, or it "
                    "has other strides than its tensor",
                    with_unit(failed->requested_bytes)),
                .bytes = failed->requested_bytes,
                .fix = "gradient_without_copy"};
}

Found find_autocast_cache(const ReasonFacts& facts) {
  const AutocastUse use = find_autocast(facts.device.state);
  if (!is_large(facts, use.cache_bytes, 0.2)) return {};
  const bool infers = facts.device.attribution.backward_bytes == 0;
  if (!infers) return {};  // backward needs them
  return Reason{.text = fmt::format("autocast's weight cache: {} of casts are kept until the autocast region ends",
                                    with_unit(use.cache_bytes)),
                .bytes = use.cache_bytes,
                .fix = "autocast_without_cache",
                .how = {fmt::format("with torch.autocast(\"cuda\", torch.{}, cache_enabled=False):", use.dtype)}};
}

// Without its cache, autocast casts a weight whenever a layer uses it, and autograd keeps each cast until backward.
Found find_repeated_casts(const ReasonFacts& facts) {
  const AutocastUse use = find_autocast(facts.device.state);
  if (!is_large(facts, use.repeated_bytes)) return {};
  return Reason{.text = fmt::format("autocast casts the same weights again and again{}: {} casts are kept for backward "
                                    "beside the first of each, {}",
                                    at(failed_in(facts)), use.repeated_count, with_unit(use.repeated_bytes)),
                .bytes = use.repeated_bytes,
                .fix = "autocast_with_cache",
                .how = {fmt::format("with torch.autocast(\"cuda\", torch.{}):  # cache_enabled=True, one region around "
                                    "the whole forward pass",
                                    use.dtype)}};
}

namespace {

/// What a step of one parameter after the other makes beside it, as the square root of a moment: of a weight that is most of all.
Found find_temporaries_of_weight(const ReasonFacts& facts, const OutOfMemory& failed) {
  const LiveBlock* const weight = sum_category(facts, Category::parameter).largest;
  if (weight == nullptr || failed.requested_bytes != weight->requested_bytes) return {};
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category == Category::temporary && block.phase == Phase::optimizer &&
           block.requested_bytes == weight->requested_bytes;
  });
  const int64_t bytes = made.bytes + failed.requested_bytes;
  if (made.count == 0 || !is_large(facts, bytes)) return {};
  const std::string name = weight->name.empty() ? "the largest weight" : std::string(weight->name);
  return Reason{.text = fmt::format(
                    "the optimizer's step makes {} tensors as large as {}{}, {} in all, above the weight, "
                    "its gradient and its state ({}{})",
                    made.count + 1, name, comma_shape(*weight), with_unit(bytes), failed.where.op, at(failed.where)),
                .bytes = bytes,
                .fix = "fused_or_single",
                .how = {"optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # makes none of them; or the "
                        "weight in several parameters"}};
}

}  // namespace

Found find_optimizer_temporaries(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::optimizer) return {};
  const auto is_foreach = [](const Where& where) {
    return where.op.starts_with("aten::_foreach") || where.inner.starts_with("aten::_foreach");
  };
  if (!is_foreach(failed->where)) {
    if (Found of_weight = find_temporaries_of_weight(facts, *failed)) return of_weight;
  }
  const Share temporaries = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category != Category::optimizer_state && is_foreach(block.made);
  });
  if (!is_large(facts, temporaries.bytes + (is_foreach(failed->where) ? failed->requested_bytes : 0), 0.1)) return {};
  return Reason{.text = fmt::format("the optimizer's step works on all parameters at once (foreach): {} of temporaries",
                                    with_unit(temporaries.bytes + failed->requested_bytes)),
                .bytes = temporaries.bytes + failed->requested_bytes,
                .fix = "fused_or_single"};
}

namespace {

/// The function that both errors left, by another line each: "score(), rerank.py:58". Empty where none is known.
std::string find_handler(const OutOfMemory& caught, const OutOfMemory& failed) {
  const std::vector<StackCall> before = parse_stack(caught.stack), now = parse_stack(failed.stack);
  const auto [first, second] = std::mismatch(  // from the outermost call on
      before.rbegin(), before.rend(), now.rbegin(), now.rend(),
      [](const StackCall& a, const StackCall& b) { return a.place == b.place && a.function == b.function; });
  const bool is_known = first != before.rend() && second != now.rend() && first->function == second->function;
  return is_known && !second->function.empty() && !is_of_package(*second) ? name_call(*second) : std::string();
}

}  // namespace

Found find_caught(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  const auto caught = std::ranges::find(facts.device.ooms, Outcome::caught, &OutOfMemory::outcome);
  if (caught == facts.device.ooms.end() || caught->event >= failed->event) return {};
  if (!is_large(facts, std::min(caught->allocated_bytes, failed->allocated_bytes))) return {};
  const std::string error = fmt::format("the traceback of an out-of-memory error{}", at(caught->where));
  const std::string handler = find_handler(*caught, *failed);
  return Reason{.text = fmt::format("{}{} is still there, and its frames keep {}", error,
                                    handler.empty() ? "" : fmt::format(", which {} handles,", handler),
                                    with_unit(caught->allocated_bytes)),
                .bytes = caught->allocated_bytes,
                .kept_by = error,
                .fix = "retry_outside_except",
                .how = {"except torch.OutOfMemoryError: failed = True  # and after the except block: if failed: ..."}};
}

Found find_private_pools(const ReasonFacts& facts) {
  std::map<uint8_t, int64_t> pools;
  std::vector<int64_t> sizes;  // of the segments of all
  for (const SegmentLayout& segment : facts.device.state.segments) {
    if (segment.pool == 0) continue;
    pools[segment.pool] += segment.bytes;
    sizes.push_back(segment.bytes);
  }
  int64_t bytes = 0;
  for (const auto& [pool, reserved] : pools) bytes += reserved;
  if (pools.empty() || !is_large(facts, bytes)) return {};
  if (pools.size() == 1) return names_one_pool(bytes, sizes);
  return Reason{.text = fmt::format("{} private memory pools of CUDA graphs hold {}, each for itself", pools.size(),
                                    with_unit(bytes)),
                .bytes = bytes,
                .kept_by = "CUDA graphs: each keeps what its pool caches, too",
                .fix = "one_graph_pool",
                .how = {"pool = torch.cuda.graph_pool_handle()", "with torch.cuda.graph(graph, pool=pool):"}};
}

namespace {

/// As many as the screen has room for.
std::vector<std::string> lines_for_logits(bool is_copied, bool in_graph, bool of_each_word, bool by_transformers) {
  constexpr size_t kMost = 3;
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
  if (lines.size() > kMost) lines.resize(kMost);
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

Found find_sparse_operand(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !failed->where.node.starts_with("Sparse") || !is_large(facts, failed->requested_bytes))
    return {};
  return Reason{.text = fmt::format("a dense gradient of a sparse matrix{}: {}", at(failed->where),
                                    with_unit(failed->requested_bytes)),
                .bytes = failed->requested_bytes,
                .fix = "no_sparse_gradient",
                .how = {"adjacency = adjacency.detach()  # or requires_grad_(False): its gradient is dense"}};
}

namespace {

/// Of the program's own variables, each once, at most three.
void add_name(std::string_view name, std::vector<std::string_view>& names) {
  constexpr size_t kMost = 3;
  const bool is_known = name.empty() || std::ranges::find(names, name) != names.end();
  if (!is_known && names.size() < kMost) names.push_back(name);
}

}  // namespace

Found find_earlier_outputs(const ReasonFacts& facts) {
  const uint32_t now = facts.device.state.step;
  if (failure(facts) == nullptr || now < 2 || leading_growth(facts) != nullptr) return {};
  std::vector<std::string_view> names;
  int64_t by_graph = 0;  // of them: no variable has it. What nodes save goes with their backward
  const Share earlier = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_tensor = block.category == Category::output || block.category == Category::activation ||
                           block.category == Category::temporary;
    // A backward pass that runs may need what the graph of an earlier one made: gradients of gradients.
    const bool is_needed = failure(facts)->phase == Phase::backward && !block.saved_by.empty();
    if (!is_tensor || is_needed || block.step == 0 || block.step >= now) return false;
    const Referrer* const referrer = facts.referrers.find(block);
    // What is older, and no variable of the program has, may be somebody's cache.
    if (block.step + 1 < now && referrer == nullptr) return false;
    if (referrer != nullptr) add_name(container_name(referrer->variable), names);
    by_graph += referrer == nullptr ? block.bytes : 0;
    return true;
  });
  if (!is_large(facts, earlier.bytes, 0.15)) return {};
  const Found larger = find_larger_step(facts);
  if (larger && larger->bytes > 2 * earlier.bytes) return {};
  const std::string all_names = fmt::format("{}", fmt::join(names, ", "));
  const std::string of_names = names.empty() ? "" : ", of " + all_names;
  const std::string line =
      fmt::format("del {}  # when they have served: a name keeps its tensor until it is assigned again",
                  names.empty() ? "output, loss" : all_names);
  const bool leads_to_graph = std::ranges::any_of(facts.device.referrers, [&](const Referrer& one) {
    return one.nodes >= kSeveralNodes && std::ranges::find(names, container_name(one.variable)) != names.end();
  });
  if (leads_to_graph && by_graph * 2 > earlier.bytes && facts.device.attribution.backward_bytes > 0) {
    return Reason{
        .text = fmt::format("a graph of step {} through which no backward ran is still alive in step {}{}{}: {}",
                            earlier.largest->step, now, at(earlier.made()), of_names, with_unit(earlier.bytes)),
        .bytes = earlier.bytes,
        .fix = "no_grad_in_evaluation",
        .how = {fmt::format("with torch.no_grad():  # around what makes {}, where nothing learns from it",
                            names.empty() ? "them" : all_names),
                line}};
  }
  return Reason{.text = fmt::format("tensors of step {} are still alive in step {}{}{}: {}", earlier.largest->step, now,
                                    at(earlier.made()), of_names, with_unit(earlier.bytes)),
                .bytes = earlier.bytes,
                .fix = "delete_outputs",
                .how = {line}};
}

namespace {

/// The line of "train.py:31"; 0 where there is none.
int line_of(std::string_view source) {
  const size_t colon = source.rfind(':');
  return colon == source.npos ? 0 : std::atoi(std::string(source.substr(colon + 1)).c_str());
}

}  // namespace

// A loop outside of any module: what its variables had in the turn before lives until the same line assigns them anew. That turn got
// through this line, as it had nothing yet to replace.
Found find_replaced_variables(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure_outside_of_layers(facts);
  if (failed == nullptr || failed->where.source.empty() || joins(failed->where) || is_copy(failed->where.op)) return {};
  if (leading_growth(facts) != nullptr) return {};
  if (find_earlier_outputs(facts)) return {};  // steps are known, which says more
  const std::string_view file = failed->where.source.substr(0, failed->where.source.rfind(':'));
  const int line = line_of(failed->where.source);
  std::string_view place;  // of the variable that this line assigns
  for (const LiveBlock& block : facts.device.state.blocks) {
    const Referrer* const referrer = facts.referrers.find(block);
    const bool is_replaced = block.made.source == failed->where.source && referrer != nullptr &&
                             !is_container(referrer->variable) && block.requested_bytes * 4 > failed->requested_bytes;
    if (is_replaced) place = place_of(referrer->variable);
  }
  if (place.empty()) return {};
  std::vector<std::string_view> names;
  const Share replaced = sum_blocks(facts, [&](const LiveBlock& block) {
    const Referrer* const referrer = is_data(block) && block.saved_by.empty() ? facts.referrers.find(block) : nullptr;
    if (referrer == nullptr || is_container(referrer->variable) || joins(block.made)) return false;
    const bool is_of_turn = place_of(referrer->variable) == place && block.made.source.starts_with(file) &&
                            line_of(block.made.source) >= line && block.made.module.empty();
    if (is_of_turn) add_name(container_name(referrer->variable), names);
    return is_of_turn;
  });
  if (names.empty() || !is_large(facts, replaced.bytes, 0.15) || !lets_request_through(facts, replaced.bytes))
    return {};
  // A second tensor beside one of its size is more than what the turn before has left.
  const bool is_second = std::ranges::any_of(facts.device.state.blocks, [&](const LiveBlock& block) {
    const bool is_alike = block.requested_bytes == failed->requested_bytes && block.made.source != failed->where.source;
    const Referrer* const referrer = is_alike ? facts.referrers.find(block) : nullptr;
    return referrer != nullptr && !function_of(referrer->variable).empty() && !is_container(referrer->variable);
  });
  if (is_second && replaced.bytes < failed->requested_bytes) return {};
  const std::string all_names = fmt::format("{}", fmt::join(names, ", "));
  return Reason{
      .text = fmt::format("what the turn of the loop before has made is still there as the next is made{}: {}, {}",
                          at(failed->where), all_names, with_unit(replaced.bytes)),
      .bytes = replaced.bytes,
      .fix = "delete_outputs",
      .how = {fmt::format("del {}  # at the end of each turn: a name keeps its tensor until it is assigned again",
                          all_names)}};
}

}  // namespace oomdiag
