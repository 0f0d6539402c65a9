#include "profiler/explain/reason_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "profiler/explain/bytes_text.h"
#include "profiler/explain/fix_rules.h"
#include "profiler/explain/reason_evidence.h"
#include "profiler/explain/shape.h"
#include "profiler/one_of.h"
#include "profiler/replay/evidence/autocast_cache.h"

// Rows of kReasons that look for their evidence among the live blocks and at the request that failed. Each wants it to be a
// large part of both: a reason that is wrong costs more trust than one that is missing.

namespace oomdiag {
namespace {

/// The growth that stands first, if it or all of them hold a large part.
const Growth* leading_growth(const ReasonFacts& facts) {
  const bool large = !facts.growths.empty() && (is_large(facts, facts.growths.front().grown_bytes, 0.2) ||
                                                is_large(facts, sum_grown(facts.growths), 0.4));
  return large || (failure(facts) == nullptr && !facts.growths.empty()) ? &facts.growths.front() : nullptr;
}

constexpr int64_t kSeveralPasses = 8;

/// Whether a variable leads to many nodes.
bool keeps_nodes(const ReasonFacts& facts) {
  return std::ranges::any_of(facts.device.referrers, [](const Referrer& one) { return one.nodes >= kSeveralPasses; });
}

/// Whether graphs of earlier steps are gone, and outputs of their ops stay: variables refer to most of what stays. Where
/// variables are not known, what a node had saved is saved by none any more. Nothing is known of graphs that backward has not
/// come to; and what no node saves may be the result of a convolution.
bool keeps_outputs(const ReasonFacts& facts, const Growth& growth) {
  if (growth.kind != GrowthKind::retained_graph) return false;
  if (growth.is_referred()) return true;
  if (keeps_nodes(facts)) return false;
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

bool is_loss_op(const Where& where) {
  return is_one_of(where.op, {"aten::cross_entropy_loss", "aten::log_softmax", "aten::_log_softmax", "aten::nll_loss"});
}

/// Tables of words, and what has a number for each of them.
struct Vocabularies {
  std::set<int64_t>
      words{};  ///< first sizes of tall parameters: shapes of outputs are not known before a backward pass
  std::set<int64_t> of_losses{};  ///< bytes of what a loss made of as many numbers as a smaller parameter has rows

  /// Whole rows, many of them; or as many numbers as a loss made.
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

Vocabularies find_vocabularies(const ReasonFacts& facts) {
  constexpr int64_t kManyWords = 8192, kManyClasses = 256;
  Vocabularies found;
  std::set<int64_t> rows;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const std::vector<int64_t> shape =
        block.category == Category::parameter ? parse_shape(block.shape) : std::vector<int64_t>();
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

bool records_graph(const ReasonFacts& facts) {
  return std::ranges::any_of(facts.device.step_allocations.blocks,
                             [](const StepAllocation& block) { return block.in_graph; });
}

/// Of a layer that has a number for each word, or of the loss that takes them.
bool makes_logits(const Where& where) {
  constexpr std::array<std::string_view, 7> kProducts = {"aten::linear", "aten::matmul", "aten::addmm",  "aten::mm",
                                                         "aten::bmm",    "aten::einsum", "aten::baddbmm"};
  return is_loss_op(where) || is_one_of(where.op, kProducts) || is_one_of(where.inner, kProducts);
}

/// Whether a graph that a variable leads to may be what keeps them: its nodes have no objects of Python.
bool is_kept_by_graph(const ReasonFacts& facts, const Growth& growth) {
  const bool in_graph = std::ranges::any_of(facts.device.step_allocations.blocks, [&](const StepAllocation& block) {
    return block.in_graph && block.made.op == growth.held.op && block.made.source == growth.held.source;
  });
  return in_graph && keeps_nodes(facts);
}

/// Whether it went as the error was raised: a list that an expression was filling had held it, which no variable refers to. Cycles stay.
bool is_let_go(const ReasonFacts& facts, const Growth& growth) {
  const auto is_of_growth = [&](const LiveBlock& block) { return block.made == growth.held || growth.has(block.made); };
  const Share all = sum_blocks(facts, is_of_growth);
  const Share gone = sum_blocks(facts, [&](const LiveBlock& block) { return block.let_go && is_of_growth(block); });
  return gone.bytes * 2 > all.bytes;
}

/// The same where each step leaves one tensor behind: no variable refers to it, and one leads to as many nodes.
bool is_kept_by_one_graph(const ReasonFacts& facts, const Growth& growth) {
  const int64_t blocks = growth.places.empty() ? 0 : growth.places.front().blocks;
  const bool leads = std::ranges::any_of(
      facts.device.referrers, [&](const Referrer& one) { return one.nodes >= std::max(blocks, kSeveralPasses); });
  return growth.referrer.empty() && !growth.is_referred() && leads && is_kept_by_graph(facts, growth);
}

/// In how many steps a state of an optimizer was made: one makes all of it in one.
size_t count_optimizers(const ReasonFacts& facts) {
  std::set<uint32_t> steps;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.category == Category::optimizer_state) steps.insert(block.step);
  }
  return steps.size();
}

/// Backward of an op that a graph records, too, has an op's name.
bool is_of_backward(const Where& where) { return !where.node.empty() || where.op.find("_backward") != where.op.npos; }

/// Whether the variable has a tensor that collects results of several steps.
bool is_joined(const ReasonFacts& facts, const Growth& growth) {
  return std::ranges::any_of(facts.device.referrers, [&](const Referrer& one) {
    const bool joins = is_one_of(one.made.op, {"aten::cat", "aten::stack", "aten::hstack", "aten::vstack"});
    return joins && !growth.referrer.empty() && one.variable == growth.referrer;
  });
}

/// Whether each step keeps what backward made for a second derivative, and no list collects it: the next step is computed from it.
bool differentiates_steps(const ReasonFacts& facts, const Growth& growth) {
  constexpr double kWorth = 0.2;
  if (growth.kind == GrowthKind::growing_buffer || growth.is_collected() || is_joined(facts, growth)) return false;
  int64_t all = 0, of_backward = 0;
  for (const Growth& one : facts.growths) {
    for (const GrowingPlace& place : one.places) {
      all += place.bytes_per_step;
      of_backward += is_of_backward(place.where) ? place.bytes_per_step : 0;
    }
  }
  return of_backward > 0 && static_cast<double>(of_backward) >= kWorth * static_cast<double>(all);
}

Reason inner_steps(const Growth& growth) {
  return {
      .id = {},
      .text = fmt::format("create_graph=True{}: each step is computed from the gradients of the one before, and its "
                          "graph stays with theirs, {}",
                          at(growth.held), growing_text(growth)),
      .bytes = growth.grown_bytes,
      .fix = "stop_growth",
      .how = {"gradients = torch.autograd.grad(loss, weights, create_graph=False)  # first order; or fewer inner steps",
              "weights = [w.detach().requires_grad_() for w in weights]  # where the steps before need no gradient"}};
}

std::vector<std::string> lines_for_graphs(const ReasonFacts& facts, const Growth& growth) {
  if (!growth.is_collected()) return {"total += loss.item()  # of a tensor: loss.detach()"};
  std::vector<std::string> lines{"kept.append(x.detach())  # of a scalar: x.item(); on the host: x.detach().cpu()"};
  if (facts.device.attribution.backward_bytes == 0)
    lines.emplace_back(
        "loss.backward()  # in the loop, if these are losses to be added: gradients add up, as of the sum");
  return lines;
}

/// The variable that leads to most nodes.
std::string_view find_graph_variable(const ReasonFacts& facts) {
  const auto most = std::ranges::max_element(facts.device.referrers, {}, &Referrer::nodes);
  return most == facts.device.referrers.end() || most->nodes == 0 ? std::string_view() : most->variable;
}

/// Many equal tensors of one line, made before any module was called, of which no variable is known.
Found find_cycles_without_steps(const ReasonFacts& facts) {
  constexpr int64_t kMany = 8;
  if (!facts.device.looked_for_referrers || facts.device.state.step > 0) return {};
  std::map<std::tuple<std::string_view, std::string_view, int64_t>, int64_t> alike;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool may_be_cycle = !block.pending_free && !block.let_go && !is_of_models(block.category);
    if (may_be_cycle && !block.made.source.empty()) ++alike[{block.made.op, block.made.source, block.bytes}];
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

}  // namespace

Found find_create_graph(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind == GrowthKind::growing_buffer) return {};
  if (growth->is_referred()) return {};         // gradients that a variable of the program collects
  if (count_optimizers(facts) >= 3) return {};  // whole trainings pile up
  if (growth->held.node.empty()) return differentiates_steps(facts, *growth) ? inner_steps(*growth) : Found{};

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
  if (growth == nullptr || growth->kind == GrowthKind::growing_buffer) return {};
  const bool retained = growth->kind == GrowthKind::retained_graph ? !keeps_outputs(facts, *growth)
                                                                   : is_kept_by_one_graph(facts, *growth);
  if (!retained) return {};
  const std::string_view variable = growth->referrer.empty() ? find_graph_variable(facts) : growth->referrer;
  const std::string_view keeps = variable.empty() ? "a tensor that is kept from each step" : variable;
  return Reason{
      .id = {},
      .text = fmt::format("{} keeps the graph of each step{}, {}", keeps, at(growth->held), growing_text(*growth)),
      .bytes = growth->grown_bytes,
      .fix = "stop_growth",
      .how = lines_for_graphs(facts, *growth)};
}

// What a program did not reach by its variables as it ended, though these were looked through: objects that refer to
// themselves. Tensors that a library keeps in C++ are rare, and none of them is of each step.
Found find_reference_cycle(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr) return find_cycles_without_steps(facts);
  if (growth->kind == GrowthKind::growing_buffer || !growth->referrer.empty()) return {};
  if (!facts.device.looked_for_referrers || is_kept_by_graph(facts, *growth)) return {};
  if (is_let_go(facts, *growth)) return {};
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
  constexpr int64_t kManyParts = 8;  // of one tensor: together they are most of it
  const int64_t tensors = growth->places.empty() ? 0 : growth->places.front().blocks;
  const bool keep_it_all = bytes * 2 > growth->grown_bytes || (tensors > 0 && views > kManyParts * tensors);
  if (views * 2 <= all || keep_it_all) return {};
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

// An exception that is kept has its traceback, and that the frames of all calls up to it with what their variables hold.
Found find_kept_traceback(const ReasonFacts& facts) {
  constexpr std::string_view kFrame = "whose frame the traceback in ";
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || !has(growth->referrer, kFrame)) return {};
  const size_t begin = growth->referrer.find(kFrame) + kFrame.size();
  const std::string_view name = growth->referrer.substr(begin, growth->referrer.rfind(" keeps") - begin);
  int64_t bytes = 0;
  for (const Growth& one : facts.growths) bytes += has(one.referrer, kFrame) ? one.grown_bytes : 0;
  return Reason{
      .id = {},
      .text = fmt::format("exceptions are kept in {}: the traceback of each keeps the frames of its calls, and {} "
                          "of tensors in their variables",
                          name, with_unit(bytes)),
      .bytes = bytes,
      .fix = "stop_growth",
      .how = {"failed.append(str(error))  # in place of the exception; or error.with_traceback(None)"}};
}

// A tensor on the context of an autograd.Function that is its own output leads back to the node, which owns the context.
Found find_output_on_context(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->places.empty() || growth->is_referred()) return {};
  int64_t all = 0, of_function = 0;
  const std::string_view name = growth->held.op;
  const bool is_function = !name.empty() && !has(name, "::") && growth->held.node.empty();
  for (const Growth& one : facts.growths) {
    all += one.bytes_per_step;
    of_function += one.held.op == name ? one.bytes_per_step : 0;
  }
  if (!is_function || growth->kind != GrowthKind::kept_tensors || of_function * 5 < all * 4) return {};
  return Reason{
      .id = {},
      .text = fmt::format("what {} makes{} stays after each step, {}: an output that is put on ctx keeps its node, "
                          "and that keeps ctx",
                          name, at(growth->held), growing_text(*growth)),
      .bytes = growth->grown_bytes,
      .fix = "stop_growth",
      .how = {"ctx.save_for_backward(output)  # in place of ctx.output = output; in backward: ctx.saved_tensors"}};
}

// A list that is being filled by a loop in which no module is called and no step ends.
Found find_collected_results(const ReasonFacts& facts) {
  constexpr int64_t kMany = 8;
  if (leading_growth(facts) != nullptr) return {};
  std::map<std::string_view, Share> held;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.pending_free || is_of_models(block.category) || block.made.source.empty()) continue;
    const auto referrer = std::ranges::find_if(facts.device.referrers, [&](const Referrer& one) {
      return one.made == block.made && one.storage_bytes == block.requested_bytes;
    });
    const bool is_listed = referrer != facts.device.referrers.end() && referrer->variable.starts_with("list ");
    if (is_listed) held[referrer->variable].add(block);
  }
  const auto most = std::ranges::max_element(held, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == held.end() || most->second.count < kMany || !is_large(facts, most->second.bytes, 0.4)) return {};
  const auto& [variable, share] = *most;
  return Reason{
      .id = {},
      .text = fmt::format("{} keeps {} results{}: {}", variable, share.count, at(share.made()), with_unit(share.bytes)),
      .bytes = share.bytes,
      .fix = "results_to_host",
      .how = {"results.append(output.cpu())  # or of each only what is used: topk, a mean, an index"}};
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

Found find_logits(const ReasonFacts& facts) {
  const Vocabularies vocabularies = find_vocabularies(facts);
  const Share logits = sum_blocks(facts, [&](const LiveBlock& block) {
    return !is_of_models(block.category) && vocabularies.is_logits(block.requested_bytes);
  });
  const OutOfMemory* failed = failure(facts);
  const bool asks_for_more = failed != nullptr && failed->phase != Phase::optimizer &&
                             (is_loss_op(failed->where) || vocabularies.is_logits(failed->requested_bytes));
  const int64_t bytes = logits.bytes + (asks_for_more ? requested_bytes(facts) : 0);
  if (logits.count == 0 && failed != nullptr && !makes_logits(failed->where)) return {};  // as many rows as words
  if (vocabularies.empty() || !is_large(facts, bytes, 0.4)) return {};
  const Where made = logits.largest != nullptr ? logits.made() : failed_in(facts);
  const std::string words =
      vocabularies.words.empty() ? "many classes" : fmt::format("a vocabulary of {}", *vocabularies.words.rbegin());
  const std::string text = fmt::format("logits over {}{}, and copies of them: {}", words, at(made), with_unit(bytes));
  const bool learns = trains(facts) || facts.device.attribution.backward_bytes > 0 || records_graph(facts);
  if (!learns) return Reason{.id = {}, .text = text, .bytes = bytes, .fix = "logits_in_parts"};
  return Reason{
      .id = {},
      .text = text,
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
  const Where where = gradients.largest != nullptr ? gradients.made() : failed_in(facts);
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
      .text = fmt::format("tensors of step {} are still alive in step {}{}: {}", now - 1, now, at(earlier.made()),
                          with_unit(earlier.bytes)),
      .bytes = earlier.bytes,
      .fix = "delete_outputs",
      .how = {"del output, loss  # at the end of the loop's body: a name keeps its tensor until it is assigned again"}};
}

}  // namespace oomdiag
