#include "profiler/explain/reason_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "profiler/explain/bytes_text.h"
#include "profiler/explain/fix_rules.h"
#include "profiler/explain/shape.h"
#include "profiler/one_of.h"
#include "profiler/replay/evidence/autocast_cache.h"

// Rows of kReasons that look for their evidence among the live blocks and at the request that failed. Each wants it to be a
// large part of both: a reason that is wrong costs more trust than one that is missing.

namespace oomdiag {
namespace {

bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// " at train.py:31", or empty.
std::string at(const Where& where) {
  const std::string place = where.source.empty() ? std::string() : short_place(where);
  return place.empty() ? std::string() : " at " + place;
}

std::string comment_at(const Where& where) {
  const std::string place = at(where);
  return place.empty() ? std::string() : "  #" + place;
}

/// Bytes of the live blocks for which `holds`, and the largest of them.
struct Share {
  int64_t bytes = 0;
  const LiveBlock* largest = nullptr;
};

template <class Holds>
Share sum_blocks(const ReasonFacts& facts, const Holds& holds) {
  Share share;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.pending_free || !holds(block)) continue;
    share.bytes += block.bytes;
    if (share.largest == nullptr || block.bytes > share.largest->bytes) share.largest = &block;
  }
  return share;
}

const OutOfMemory* failure(const ReasonFacts& facts) { return facts.device.failure ? &*facts.device.failure : nullptr; }

bool fails_in(const ReasonFacts& facts, std::initializer_list<std::string_view> ops) {
  const OutOfMemory* failed = failure(facts);
  return failed != nullptr && (is_one_of(failed->where.op, ops) || is_one_of(failed->where.inner, ops));
}

/// The growth that stands first, if it holds a large part.
const Growth* leading_growth(const ReasonFacts& facts) {
  const bool large = !facts.growths.empty() && is_large(facts, facts.growths.front().grown_bytes, 0.2);
  return large || (failure(facts) == nullptr && !facts.growths.empty()) ? &facts.growths.front() : nullptr;
}

/// Whether graphs of earlier steps are gone, and outputs of their ops stay: what a node had saved is saved by none any more.
/// Nothing is known of graphs that backward has not come to; and what no node saves may be the result of a convolution.
bool keeps_outputs(const ReasonFacts& facts, const Growth& growth) {
  if (growth.kind != GrowthKind::retained_graph) return false;
  int64_t released = 0, saved = 0, all = 0;
  for (const StepAllocation& block : facts.device.step_allocations.blocks) {
    if (block.is_of_step() || !block.in_graph || block.phase != Phase::forward) continue;
    all += block.bytes;
    saved += block.category == Category::activation ? block.bytes : 0;
    released += block.category == Category::output && block.ever_saved ? block.bytes : 0;
  }
  return released > 0 && released * 10 >= all * 3 && saved * 10 <= released;
}

std::string growing_text(const Growth& growth) { return with_unit(growth.bytes_per_step) + " per step"; }

/// The request or the largest live block of n × n: shape as text, bytes of all that are alike.
struct Square {
  std::string shape;
  int64_t bytes = 0;
  Where made{};
  bool batched = false;
};

std::string text_of(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

bool is_square(const std::vector<int64_t>& shape) {
  constexpr int64_t kLong = 512;
  return shape.size() >= 3 && shape.back() == shape[shape.size() - 2] && shape.back() >= kLong;
}

bool makes_scores(const Where& where) {
  for (const std::string_view op : {where.op, where.inner}) {
    if (is_one_of(op, {"aten::softmax", "aten::_softmax", "aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum",
                       "aten::mul", "aten::div", "aten::dropout", "aten::native_dropout", "aten::masked_fill",
                       "aten::add", "aten::_safe_softmax", "aten::scaled_dot_product_attention",
                       "aten::_scaled_dot_product_attention_math"})) {
      return true;
    }
  }
  return false;
}

/// The same where no shape is known: a request of rows × rows (× width) beside a tensor of so many rows.
Square factor_sizes(const ReasonFacts& facts, const OutOfMemory& failed) {
  constexpr int64_t kManyRows = 1000, kItem = 4, kRounding = 512;
  const int64_t items = failed.requested_bytes / kItem;
  const auto rows = static_cast<int64_t>(std::sqrt(static_cast<double>(items)));
  const bool square = rows >= kManyRows && failed.requested_bytes - rows * rows * kItem < kRounding;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const int64_t bytes = block.requested_bytes;
    if (square && bytes >= rows * kItem * 8 && bytes % (rows * kItem) == 0) {
      return {.shape = text_of({rows, rows}), .bytes = failed.requested_bytes, .made = failed.where};
    }
    const int64_t many = bytes > 0 ? failed.requested_bytes / bytes : 0;
    if (many >= kManyRows && failed.requested_bytes - many * bytes < kRounding && bytes % (many * kItem) == 0) {
      return {
          .shape = text_of({many, many, bytes / many / kItem}), .bytes = failed.requested_bytes, .made = failed.where};
    }
  }
  return {};
}

/// The requested bytes as rows × rows of tensors that live: their sizes are n × m of a product or a difference.
Square factor_request(const ReasonFacts& facts, const OutOfMemory& failed) {
  constexpr int64_t kManyRows = 500, kSegmentRounding = 2 << 20;
  std::set<std::vector<int64_t>> shapes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    if (shape.size() >= 2 && shape[shape.size() - 2] >= kManyRows) shapes.insert(shape);
  }
  for (const int64_t item : {4, 2, 8}) {
    for (const auto& a : shapes) {
      for (const auto& b : shapes) {
        std::vector<int64_t> pairs(a.begin(), a.end() - 1);
        pairs.push_back(b[b.size() - 2]);
        int64_t elements = 1;
        for (const int64_t size : pairs) elements *= size;
        for (const int64_t width : {int64_t{1}, a.back()}) {
          const int64_t difference = failed.requested_bytes - elements * width * item;
          if (difference < 0 || difference >= kSegmentRounding) continue;
          if (width > 1) pairs.push_back(width);
          return {.shape = text_of(pairs),
                  .bytes = failed.requested_bytes,
                  .made = failed.where,
                  .batched = a.size() > 2 && width == 1};
        }
      }
    }
  }
  return factor_sizes(facts, failed);
}

bool is_of_models(Category category) {
  return category == Category::parameter || category == Category::gradient || category == Category::optimizer_state;
}

/// The numbers of words: first sizes of tall parameters. Shapes of outputs are not known before a backward pass, sizes are.
std::set<int64_t> find_vocabularies(const ReasonFacts& facts) {
  constexpr int64_t kManyWords = 8192;
  std::set<int64_t> words;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.category != Category::parameter) continue;
    const std::vector<int64_t> shape = parse_shape(block.shape);
    if (shape.size() == 2 && shape[0] >= kManyWords && shape[0] > 4 * shape[1]) words.insert(shape[0]);
  }
  return words;
}

/// Whether so many bytes are whole rows of the vocabulary, many of them.
bool is_rows_of_words(int64_t bytes, const std::set<int64_t>& vocabularies) {
  constexpr int64_t kFewRows = 64, kRounding = 512;
  return std::ranges::any_of(
      vocabularies, [&](int64_t words) { return bytes >= kFewRows * words * 2 && bytes % (words * 2) < kRounding; });
}

bool is_loss_op(const Where& where) {
  return is_one_of(where.op, {"aten::cross_entropy_loss", "aten::log_softmax", "aten::_log_softmax", "aten::nll_loss"});
}

/// Sizes of the model's own tensors that are no usual ones.
std::set<int64_t> find_sizes_of_weights(const ReasonFacts& facts) {
  constexpr int64_t kTelling = 1 << 20;
  std::set<int64_t> sizes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (is_of_models(block.category) && block.requested_bytes >= kTelling) sizes.insert(block.requested_bytes);
  }
  return sizes;
}

/// What torch.load makes, it makes without an op: such a tensor of a weight's size is a weight or a moment of a file.
bool is_copy_of_weights(const LiveBlock& block, const std::set<int64_t>& weights) {
  return block.category == Category::unknown && block.made.op.empty() && block.made.node.empty() &&
         !block.before_recording && weights.contains(block.requested_bytes);
}

/// Whether a graph that a variable leads to may be what keeps them: its nodes have no objects of Python.
bool is_kept_by_graph(const ReasonFacts& facts, const Growth& growth) {
  constexpr int64_t kSeveralPasses = 8;
  const bool in_graph = std::ranges::any_of(facts.device.step_allocations.blocks, [&](const StepAllocation& block) {
    return block.in_graph && block.made.op == growth.held.op && block.made.source == growth.held.source;
  });
  return in_graph &&
         std::ranges::any_of(facts.device.referrers, [](const Referrer& one) { return one.nodes >= kSeveralPasses; });
}

Reason reference_cycle(const std::string& what, int64_t bytes) {
  return {
      .id = {},
      .text = fmt::format("no variable leads to {}: reference cycles, which wait for Python's garbage collector", what),
      .bytes = bytes,
      .fix = "collect_garbage",
      .how = {"gc.collect()  # after each step; or no cycle: weakref.ref(self) in callbacks and hooks"}};
}

/// Many equal tensors of one line, made before any module was called, of which no variable is known.
Found find_cycles_without_steps(const ReasonFacts& facts) {
  constexpr int64_t kMany = 8;
  if (!facts.device.looked_for_referrers || facts.device.state.step > 0) return {};
  std::map<std::tuple<std::string_view, std::string_view, int64_t>, int64_t> alike;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (!block.pending_free && !block.made.source.empty()) ++alike[{block.made.op, block.made.source, block.bytes}];
  }
  const auto most = std::ranges::max_element(
      alike, {}, [](const auto& entry) { return entry.second * std::get<int64_t>(entry.first); });
  if (most == alike.end() || most->second < kMany) return {};
  const auto& [op, source, bytes] = most->first;
  const auto known = std::ranges::count_if(facts.device.referrers, [&, op = op, source = source](const Referrer& one) {
    return one.made.op == op && one.made.source == source;
  });
  if (known * 2 >= most->second || !is_large(facts, bytes * most->second, 0.4)) return {};
  return reference_cycle(
      fmt::format("{} tensors of {} made{}", most->second, with_unit(bytes), at({.op = op, .source = source})),
      bytes * most->second);
}

bool is_copy(std::string_view op) { return is_one_of(op, {"aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda"}); }

}  // namespace

int64_t requested_bytes(const ReasonFacts& facts) {
  return facts.device.failure ? facts.device.failure->requested_bytes : 0;
}

bool is_large(const ReasonFacts& facts, int64_t bytes, double part) {
  const int64_t all = facts.device.state.allocated_bytes + requested_bytes(facts);
  return bytes > 0 && static_cast<double>(bytes) >= part * static_cast<double>(all);
}

bool trains(const ReasonFacts& facts) {
  return std::ranges::any_of(facts.device.state.blocks, [](const LiveBlock& block) { return block.trained; });
}

Found find_create_graph(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind == GrowthKind::growing_buffer || growth->held.node.empty()) return {};
  return Reason{
      .id = {},
      .text = fmt::format(
          "backward(create_graph=True){}: each parameter and its gradient keep one another and the graph, {}",
          at(growth->held), growing_text(*growth)),
      .bytes = growth->grown_bytes,
      .fix = "stop_growth",
      .how = {"gradients = torch.autograd.grad(loss, model.parameters(), create_graph=True)  # in place of backward()",
              "# and where backward() is needed: p.grad = None for each parameter at the end of the step"}};
}

Found find_earlier_graphs(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind != GrowthKind::retained_graph || keeps_outputs(facts, *growth)) return {};
  const std::string_view keeps = growth->referrer.empty() ? "a tensor that is kept from each step" : growth->referrer;
  return Reason{
      .id = {},
      .text = fmt::format("{} keeps the graph of each step{}, {}", keeps, at(growth->held), growing_text(*growth)),
      .bytes = growth->grown_bytes,
      .fix = "stop_growth",
      .how = {"total += loss.item()  # of a tensor: loss.detach()"}};
}

// What a program did not reach by its variables as it ended, though these were looked through: objects that refer to
// themselves. Tensors that a library keeps in C++ are rare, and none of them is of each step.
Found find_reference_cycle(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr) return find_cycles_without_steps(facts);
  if (growth->kind == GrowthKind::growing_buffer || !growth->referrer.empty()) return {};
  if (!facts.device.looked_for_referrers || is_kept_by_graph(facts, *growth)) return {};
  return reference_cycle("what stays of each step" + at(growth->held) + ", " + growing_text(*growth),
                         growth->grown_bytes);
}

// Of most tensors that stay a variable has a part only.
Found find_small_views(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind != GrowthKind::kept_tensors) return {};
  int64_t views = 0, bytes = 0, storage_bytes = 0, all = 0;
  for (const Referrer& referrer : facts.device.referrers) {
    if (!growth->has(referrer.made)) continue;
    ++all;
    if (!referrer.is_small_view()) continue;
    ++views;
    bytes += referrer.bytes;
    storage_bytes += referrer.storage_bytes;
  }
  if (views * 2 <= all) return {};
  return Reason{.id = {},
                .text = fmt::format("a view keeps its whole tensor: {} keeps {} parts, {} in all, of tensors of {}{}",
                                    growth->referrer.empty() ? "a variable" : growth->referrer, views, with_unit(bytes),
                                    with_unit(storage_bytes), at(growth->held)),
                .bytes = growth->grown_bytes,
                .fix = "stop_growth",
                .how = {"kept.append(x[0].clone())  # of a view: then its tensor can go; or .cpu()"}};
}

Found find_kept_tensors(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  const bool kept = growth != nullptr && (growth->kind == GrowthKind::kept_tensors || keeps_outputs(facts, *growth));
  if (!kept) return {};
  return Reason{.id = {},
                .text = growth->referrer.empty() ? fmt::format("tensors of each step are kept{}, {}", at(growth->held),
                                                               growing_text(*growth))
                                                 : fmt::format("{} keeps tensors of each step{}, {}", growth->referrer,
                                                               at(growth->held), growing_text(*growth)),
                .bytes = growth->grown_bytes,
                .fix = "stop_growth",
                .how = {"kept.append(x.detach().cpu())  # of a scalar: x.item()"}};
}

Found find_one_checkpoint(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || facts.device.packed_tensors == 0) return {};
  const Share again = sum_blocks(facts, [](const LiveBlock& block) {
    return block.phase == Phase::backward && block.category == Category::activation;
  });
  if (!is_large(facts, again.bytes, 0.5)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("one checkpoint around too much: its recomputation holds {} at once", with_unit(again.bytes)),
      .bytes = again.bytes,
      .fix = "finer_checkpoints",
      .how = {"for layer in layers: x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)"}};
}

Found find_autocast_cache(const ReasonFacts& facts) {
  const AutocastUse use = find_autocast(facts.device.state);
  if (!is_large(facts, use.cache_bytes, 0.2)) return {};
  const bool infers = facts.device.attribution.backward_bytes == 0;
  if (!infers) return {};  // backward needs them
  return Reason{.id = {},
                .text = fmt::format("autocast's weight cache: {} of casts are kept until the autocast region ends",
                                    with_unit(use.cache_bytes)),
                .bytes = use.cache_bytes,
                .fix = "autocast_without_cache",
                .how = {fmt::format("with torch.autocast(\"cuda\", torch.{}, cache_enabled=False):", use.dtype)}};
}

Found find_optimizer_temporaries(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::optimizer) return {};
  const auto is_foreach = [](const Where& where) {
    return where.op.starts_with("aten::_foreach") || where.inner.starts_with("aten::_foreach");
  };
  const Share temporaries = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category != Category::optimizer_state && is_foreach(block.made);
  });
  if (!is_large(facts, temporaries.bytes + (is_foreach(failed->where) ? failed->requested_bytes : 0), 0.1)) return {};
  return Reason{.id = {},
                .text = fmt::format("the optimizer's step works on all parameters at once (foreach): {} of temporaries",
                                    with_unit(temporaries.bytes + failed->requested_bytes)),
                .bytes = temporaries.bytes + failed->requested_bytes,
                .fix = "fused_or_single",
                .how = {"optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # or foreach=False"}};
}

Found find_caught(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  const auto caught = std::ranges::find(facts.device.refusals, Outcome::caught, &OutOfMemory::outcome);
  if (caught == facts.device.refusals.end() || caught->event >= failed->event) return {};
  if (!is_large(facts, std::min(caught->allocated_bytes, failed->allocated_bytes))) return {};
  return Reason{.id = {},
                .text = fmt::format(
                    "the handler of an earlier out-of-memory error{} still holds its traceback, whose frames keep {}",
                    at(caught->where), with_unit(caught->allocated_bytes)),
                .bytes = caught->allocated_bytes,
                .fix = "retry_outside_except",
                .how = {"except torch.OutOfMemoryError: failed = True  # and after the except block: if failed: ..."}};
}

Found find_private_pools(const ReasonFacts& facts) {
  std::map<uint8_t, int64_t> pools;
  for (const SegmentLayout& segment : facts.device.state.segments) {
    if (segment.pool != 0) pools[segment.pool] += segment.bytes;
  }
  int64_t bytes = 0;
  for (const auto& [pool, reserved] : pools) bytes += reserved;
  if (pools.size() < 2 || !is_large(facts, bytes)) return {};
  return Reason{.id = {},
                .text = fmt::format("{} private memory pools of CUDA graphs hold {}, each for itself", pools.size(),
                                    with_unit(bytes)),
                .bytes = bytes,
                .fix = "one_graph_pool",
                .how = {"pool = torch.cuda.graph_pool_handle()", "with torch.cuda.graph(graph, pool=pool):"}};
}

Found find_attention_scores(const ReasonFacts& facts) {
  Share scores = sum_blocks(
      facts, [](const LiveBlock& block) { return makes_scores(block.made) && is_square(parse_shape(block.shape)); });
  std::string shape;
  Where made{};
  const OutOfMemory* failed = failure(facts);
  if (scores.largest != nullptr) {
    shape = scores.largest->shape;
    made = scores.largest->made;
  } else if (failed != nullptr && makes_scores(failed->where) && is_large(facts, failed->requested_bytes, 0.2)) {
    const Square square = factor_request(facts, *failed);
    if (!square.batched) return {};
    shape = square.shape;
    made = failed->where;
    scores.bytes = square.bytes;
  }
  if (shape.empty() || !is_large(facts, scores.bytes, 0.2)) return {};
  return Reason{.id = {},
                .text = fmt::format("attention without a fused kernel: scores of length × length, {}{}, {} in all",
                                    shape, at(made), with_unit(scores.bytes)),
                .bytes = scores.bytes,
                .fix = "fused_attention",
                .how = {"y = F.scaled_dot_product_attention(q, k, v)  # of nn.MultiheadAttention: need_weights=False"}};
}

Found find_all_pairs(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer || !is_large(facts, failed->requested_bytes)) return {};
  const bool distances =
      fails_in(facts, {"aten::cdist", "aten::_cdist_forward", "aten::_euclidean_dist", "aten::pairwise_distance"});
  const bool products = fails_in(facts, {"aten::matmul", "aten::mm", "aten::sub", "aten::add", "aten::mul", "aten::eq",
                                         "aten::einsum", "aten::linalg_matmul"});
  const Square square = distances || products ? factor_request(facts, *failed) : Square{};
  if (!distances && square.shape.empty()) return {};
  return Reason{.id = {},
                .text = fmt::format("all pairs at once{}: the result is {}rows × rows", at(failed->where),
                                    square.shape.empty() ? "" : square.shape + ", "),
                .bytes = failed->requested_bytes,
                .fix = "pairs_in_chunks",
                .how = {"parts = [f(part, b) for part in a.split(1024)]  # reduce each part before the next"}};
}

Found find_one_hot(const ReasonFacts& facts) {
  const Share made = sum_blocks(facts, [](const LiveBlock& block) { return block.made.op == "aten::one_hot"; });
  const bool fails = fails_in(facts, {"aten::one_hot"});
  const int64_t bytes = made.bytes + (fails ? requested_bytes(facts) : 0);
  if (!is_large(facts, bytes)) return {};
  const Where& where = fails ? failure(facts)->where : made.largest->made;
  return Reason{
      .id = {},
      .text = fmt::format("one-hot labels of 64-bit integers{}: {}", at(where), with_unit(bytes)),
      .bytes = bytes,
      .fix = "class_indices",
      .how = {"loss = F.cross_entropy(logits, labels)  # takes indices; or gather() what the mask would select"}};
}

Found find_logits(const ReasonFacts& facts) {
  const std::set<int64_t> vocabularies = find_vocabularies(facts);
  const Share logits = sum_blocks(facts, [&](const LiveBlock& block) {
    return !is_of_models(block.category) && is_rows_of_words(block.requested_bytes, vocabularies);
  });
  const OutOfMemory* failed = failure(facts);
  const bool asks_for_more = failed != nullptr && failed->phase != Phase::optimizer &&
                             (is_loss_op(failed->where) || is_rows_of_words(failed->requested_bytes, vocabularies));
  const int64_t bytes = logits.bytes + (asks_for_more ? requested_bytes(facts) : 0);
  if (vocabularies.empty() || !is_large(facts, bytes, 0.4)) return {};
  const Where& made = logits.largest != nullptr ? logits.largest->made : failed->where;
  return Reason{
      .id = {},
      .text = fmt::format("logits over a vocabulary of {}{}, and copies of them: {}", *vocabularies.rbegin(), at(made),
                          with_unit(bytes)),
      .bytes = bytes,
      .fix = "loss_in_chunks",
      .how = {"losses = [checkpoint(loss_of_chunk, h, y, use_reentrant=False) for h, y in zip(h.chunk(8), y.chunk(8))]",
              "# or liger_kernel's fused linear cross-entropy"}};
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
  const Where& where = gradients.largest != nullptr ? gradients.largest->made : failed->where;
  return Reason{.id = {},
                .text = fmt::format("dense gradients of an embedding{}: {}, as large as the tables, for a few rows",
                                    at(where), with_unit(bytes)),
                .bytes = bytes,
                .fix = "sparse_embedding",
                .how = {"nn.Embedding(rows, width, sparse=True)  # with torch.optim.SparseAdam or SGD"}};
}

Found find_sparse_operand(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !failed->where.node.starts_with("Sparse") || !is_large(facts, failed->requested_bytes))
    return {};
  return Reason{.id = {},
                .text = fmt::format("a dense gradient of a sparse matrix{}: {}", at(failed->where),
                                    with_unit(failed->requested_bytes)),
                .bytes = failed->requested_bytes,
                .fix = "no_sparse_gradient",
                .how = {"adjacency = adjacency.detach()  # or requires_grad_(False): its gradient is dense"}};
}

Found find_several_models(const ReasonFacts& facts) {
  std::map<std::pair<std::string_view, std::string_view>, std::pair<int64_t, int64_t>> names;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.category != Category::parameter || block.name.empty()) continue;
    auto& [count, bytes] = names[{block.name, block.shape}];
    ++count;
    bytes += block.bytes;
  }
  int64_t twice = 0, models = 0;
  for (const auto& [name, sums] : names) {
    if (sums.first < 2) continue;
    twice += sums.second;
    models = std::max(models, sums.first);
  }
  const Share all = sum_blocks(facts, [](const LiveBlock& block) { return is_of_models(block.category); });
  if (models < 2 || !is_large(facts, twice) || !is_large(facts, all.bytes, 0.5)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("{} models of the same layers are alive: {} of parameters, gradients and optimizer state",
                          models, with_unit(all.bytes)),
      .bytes = all.bytes - all.bytes / models,
      .fix = "drop_models",
      .how = {"del model, optimizer  # of one that is still needed: model.bfloat16(), or model.cpu() until then"}};
}

Found find_loaded(const ReasonFacts& facts) {
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  const Share loaded = sum_blocks(facts, [&](const LiveBlock& block) {
    return has(block.made.inner_source, "torch/serialization") || has(block.made.source, "serialization.py") ||
           (block.made.op.empty() && block.phase == Phase::setup &&
            is_one_of(name_of(block.category), {"unknown", "output"})) ||
           is_copy_of_weights(block, weights);
  });
  if (!is_large(facts, loaded.bytes, 0.25)) return {};
  return Reason{.id = {},
                .text = fmt::format("torch.load put tensors of a file onto the GPU{}: {}", at(loaded.largest->made),
                                    with_unit(loaded.bytes)),
                .bytes = loaded.bytes,
                .fix = "load_to_host",
                .how = {"state = torch.load(path, map_location=\"cpu\")" + comment_at(loaded.largest->made)}};
}

Found find_data_on_card(const ReasonFacts& facts) {
  const Share data = sum_blocks(facts, [](const LiveBlock& block) {
    return block.category == Category::input && is_copy(block.made.op) && block.phase == Phase::setup;
  });
  if (data.largest == nullptr || !is_large(facts, data.largest->bytes, 0.4)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("the data set lies on the GPU{}: {}", at(data.largest->made), with_unit(data.bytes)),
      .bytes = data.bytes,
      .fix = "data_on_host",
      .how = {"for x in DataLoader(data, batch_size=64, pin_memory=True): x = x.cuda(non_blocking=True)"}};
}

Found find_earlier_outputs(const ReasonFacts& facts) {
  const uint32_t now = facts.device.state.step;
  if (failure(facts) == nullptr || now < 2 || leading_growth(facts) != nullptr) return {};
  const Share earlier = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_tensor = block.category == Category::output || block.category == Category::activation ||
                           block.category == Category::temporary;
    return is_tensor && block.step + 1 == now;
  });
  if (!is_large(facts, earlier.bytes, 0.15)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("tensors of step {} are still alive in step {}{}: {}", now - 1, now,
                          at(earlier.largest->made), with_unit(earlier.bytes)),
      .bytes = earlier.bytes,
      .fix = "delete_outputs",
      .how = {"del output, loss  # at the end of the loop's body: a name keeps its tensor until it is assigned again"}};
}

Found find_large_batch(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || facts.device.attribution.backward_bytes > 0 || trains(facts)) return {};
  const auto& step = facts.device.step_allocations.blocks;
  const bool any_graph =
      step.empty() || std::ranges::any_of(step, [](const StepAllocation& block) { return block.in_graph; });
  const Share saved = sum_blocks(facts, [](const LiveBlock& block) { return block.category == Category::activation; });
  const Share work = sum_blocks(facts, [](const LiveBlock& block) {
    return block.category == Category::output || block.category == Category::temporary ||
           block.category == Category::workspace;
  });
  const bool in_module = !failed->where.module.empty();
  if (!in_module || any_graph || is_large(facts, saved.bytes, 0.1) ||
      !is_large(facts, work.bytes + failed->requested_bytes, 0.5))
    return {};
  return Reason{.id = {},
                .text = fmt::format("the whole batch goes through {} at once, without gradients", failed->where.module),
                .bytes = (work.bytes + failed->requested_bytes) / 2,
                .fix = "split_batch",
                .how = {"y = torch.cat([model(part) for part in x.split(1)])  # diffusers: pipe.enable_vae_slicing()"}};
}

}  // namespace oomdiag
