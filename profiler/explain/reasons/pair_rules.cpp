#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "profiler/explain/fixes/framework_lines.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/pair_shapes.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/one_of.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"

// Rows of kReasons about one op whose result is far larger than its operands: all pairs of rows, an enlarged image, scores of
// attention.
//
// Shapes of tensors are known once autograd has saved them, sizes always. An op of equal sizes has its operands alive beside its
// result. So where all that lives beside a result, and beside what later ops made of as many elements, is at most a quarter
// of it, some op made much of little. The ops say which one; by how many rows, by the sizes of what was there before.

namespace oomdiag {
namespace {

bool makes_distances(const Where& where) {
  return any_op(where, {"aten::cdist", "aten::_cdist_forward", "aten::_euclidean_dist", "aten::pairwise_distance"});
}

/// Rows of one column more than its operands have, whatever width they are of.
bool multiplies(const Where& where) {
  return makes_distances(where) || any_op(where, {"aten::matmul", "aten::mm", "aten::bmm", "aten::einsum",
                                                  "aten::linalg_matmul", "aten::cosine_similarity"});
}

bool makes_pairs(const Where& where) {
  return makes_distances(where) || any_op(where, {"aten::matmul",
                                                  "aten::mm",
                                                  "aten::bmm",
                                                  "aten::einsum",
                                                  "aten::linalg_matmul",
                                                  "aten::outer",
                                                  "aten::sub",
                                                  "aten::add",
                                                  "aten::mul",
                                                  "aten::div",
                                                  "aten::rsub",
                                                  "aten::eq",
                                                  "aten::ne",
                                                  "aten::lt",
                                                  "aten::le",
                                                  "aten::gt",
                                                  "aten::ge",
                                                  "aten::maximum",
                                                  "aten::minimum",
                                                  "aten::max",
                                                  "aten::min",
                                                  "aten::where",
                                                  "aten::pow",
                                                  "aten::repeat",
                                                  "aten::repeat_interleave",
                                                  "aten::cosine_similarity",
                                                  "aten::bitwise_and",
                                                  "aten::bitwise_or",
                                                  "aten::logical_and",
                                                  "aten::logical_or",
                                                  "aten::clone",
                                                  "aten::contiguous",
                                                  "aten::cat"});
}

/// Of as many elements as its operand.
bool keeps_size(const Where& where) {
  return any_op(where, {"aten::exp",
                        "aten::log",
                        "aten::sqrt",
                        "aten::neg",
                        "aten::abs",
                        "aten::clamp",
                        "aten::clamp_min",
                        "aten::clamp_max",
                        "aten::square",
                        "aten::pow",
                        "aten::softmax",
                        "aten::_softmax",
                        "aten::log_softmax",
                        "aten::_log_softmax",
                        "aten::sigmoid",
                        "aten::relu",
                        "aten::masked_fill",
                        "aten::to",
                        "aten::_to_copy",
                        "aten::sort",
                        "aten::argsort",
                        "aten::argmax",
                        "aten::topk",
                        "aten::logsumexp",
                        "aten::dropout",
                        "aten::norm",
                        "aten::linalg_norm",
                        "aten::linalg_vector_norm",
                        "aten::cross_entropy_loss",
                        "aten::bitwise_not",
                        "aten::logical_not",
                        "aten::float"});
}

/// Of elements of two operands, each with each of them: its result is far larger than both where they differ in their dimensions.
bool broadcasts(const Where& where) {
  return any_op(where,
                {"aten::sub",         "aten::add",        "aten::mul",         "aten::div",         "aten::rsub",
                 "aten::eq",          "aten::ne",         "aten::lt",          "aten::le",          "aten::gt",
                 "aten::ge",          "aten::maximum",    "aten::minimum",     "aten::pow",         "aten::where",
                 "aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor", "aten::logical_and", "aten::logical_or",
                 "aten::logical_xor", "aten::atan2"});
}

bool enlarges(const Where& where) {
  return where.op.starts_with("aten::upsample_") ||
         any_op(where, {"aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::repeat",
                        "aten::repeat_interleave", "aten::im2col", "aten::unfold"});
}

bool is_square(const std::vector<int64_t>& shape) {
  constexpr int64_t kLong = 512;
  return shape.size() >= 3 && shape.back() == shape[shape.size() - 2] && shape.back() >= kLong;
}

bool makes_attention_scores(const Where& where) {
  return any_op(
      where, {"aten::softmax", "aten::_softmax", "aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum",
              "aten::mul", "aten::div", "aten::dropout", "aten::native_dropout", "aten::masked_fill", "aten::add",
              "aten::_safe_softmax", "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"});
}

/// Memory for them that a layer of attention asks for itself, as for the result of torch.baddbmm().
bool asks_for_scores(const Where& where) {
  return is_one_of(where.op, {"aten::empty", "aten::zeros", "aten::new_empty"}) && is_of_attention(where);
}

/// Whether a product of the step made as many elements: scores of attention are one before softmax() takes them. Where the step shows
/// nothing, that may be.
bool has_product(const ReasonFacts& facts, int64_t bytes) {
  const auto& step = facts.device.step_allocations.blocks;
  const auto is_product = [](const Where& made) {
    return any_op(made, {"aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum", "aten::linalg_matmul",
                         "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"});
  };
  const bool is_known = std::ranges::any_of(step, &StepAllocation::is_of_step);
  return !is_known || fails_in(facts, {"aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum"}) ||
         std::ranges::any_of(step, [&](const StepAllocation& block) {
           return is_product(block.made) && is_of_as_many(block.requested_bytes, bytes);
         });
}

/// Whether what the step made of as many elements may be scores of attention: distances are no input of a softmax, and are subtracted or sorted.
bool may_be_scores(const ReasonFacts& facts, int64_t bytes) {
  const auto is_softmax = [](const Where& made) {
    return any_op(made, {"aten::softmax", "aten::_softmax", "aten::_safe_softmax", "aten::_masked_softmax"});
  };
  const auto is_of_others = [](const Where& made) {
    return any_op(made,
                  {"aten::sub", "aten::rsub", "aten::neg", "aten::topk", "aten::sort", "aten::sqrt", "aten::pow"});
  };
  bool has_softmax = is_softmax(failed_in(facts));
  bool has_others = is_of_others(failed_in(facts)) && is_of_as_many(requested_bytes(facts), bytes);
  for (const StepAllocation& block : facts.device.step_allocations.blocks) {
    if (!is_of_as_many(block.requested_bytes, bytes)) continue;
    has_softmax = has_softmax || is_softmax(block.made);
    has_others = has_others || (is_of_others(block.made) && block.made.node.empty());
  }
  return has_softmax || !has_others;
}

/// "[1024, 1024]" of a text that has it; empty where it has none.
std::vector<int64_t> sizes_in(std::string_view text) {
  const size_t begin = text.find('[');
  return parse_shape(begin == text.npos ? "" : text.substr(begin));
}

/// "for each pair of rows", of three equal sizes one more.
std::string times_of_rows(const std::vector<int64_t>& sizes) {
  const bool are_triples = sizes.size() == 3 && sizes[0] == sizes[1] && sizes[1] == sizes[2];
  return are_triples ? "for each three rows" : "for each pair of rows";
}

/// How many rows at a time: a part is to be much smaller than the whole.
int64_t rows_of_part(const std::vector<int64_t>& sizes) {
  int64_t rows = 1024;
  while (rows > 1 && !sizes.empty() && rows * 8 > sizes.front()) rows /= 2;
  return rows;
}

std::vector<std::string> lines_for_pairs(const Square& square, const Where& where, bool of_product, bool in_graph) {
  const bool of_columns = square.of_columns && !of_product;
  const bool is_batched = any_op(where, {"aten::bmm"}) && (where.op == "aten::bmm" || !where.module.empty());
  const std::vector<int64_t> sizes = sizes_in(square.text);
  std::vector<std::string> lines{fmt::format("parts = [{} for part in a.split({})]  # reduce each part before the next",
                                             in_graph ? "checkpoint(f, part, b, use_reentrant=False)" : "f(part, b)",
                                             rows_of_part(sizes))};
  if (of_columns) {
    lines.insert(lines.begin(),
                 "loss = f(prediction.squeeze(-1), target)  # if pairs are not meant: [n, 1] with [n] is [n, n]");
  }
  if (is_batched) {
    lines.emplace_back(
        "y = F.scaled_dot_product_attention(q, k, v)  # if these are scores of attention: none are made");
  }
  if (square.has_width && any_op(where, {"aten::sub", "aten::pow"}))
    lines.emplace_back(
        "d = torch.cdist(x, y)  # and .square(), where these are distances: a product makes none of [n, m, width]");
  if (square.has_width && any_op(where, {"aten::mul"}))
    lines.emplace_back("y = a @ b.T  # where products are summed afterwards: einsum and @ make none of them");
  if (any_op(where, {"aten::einsum"}))
    lines.emplace_back("y = a @ (b @ c)  # of three operands and more: in the order that stays small");
  if (!of_columns && sizes.size() == 2 && sizes[0] == sizes[1])
    lines.emplace_back("y = (a * b).sum(-1)  # where only the diagonal is used: each row with its own");
  return lines;
}

std::vector<std::string> lines_for_enlarged(const Where& maker) {
  if (gathers(maker)) return lines_for_rows();
  if (maker.op.find("grid_sampler") != maker.op.npos)
    return {
        "y = F.grid_sample(x, part)  # for part of the grid after part; or a smaller window, or a lower resolution"};
  if (is_one_of(maker.op, {"aten::im2col", "aten::unfold"}))
    return {
        "for part in x.split(1): F.unfold(part, size)  # and reduce it, before the next; or conv2d(), which makes "
        "no copy of each window"};
  return {};  // those of the fix
}

/// A product that makes a batched operand contiguous before it multiplies.
bool copies_operand(const Where& failed) {
  return multiplies(failed) && is_one_of(failed.inner, {"aten::empty", "aten::empty_strided", "aten::clone"});
}

/// Scores of which only the size is known: a module or file that is named after attention multiplies, and makes by far more than anything
/// else that lives.
int64_t find_scores_by_name(const ReasonFacts& facts) {
  const std::optional<Expansion> found = find_expansion(facts);
  if (!found || !is_of_attention(found->failed) || found->failed.module.empty()) return 0;
  if (copies_operand(found->failed)) return 0;
  const auto is_product = [](const Where& made) { return multiplies(made) && is_of_attention(made); };
  return found->find_maker(is_product, makes_attention_scores) == nullptr ? 0 : found->bytes;
}

}  // namespace

Found find_attention_scores(const ReasonFacts& facts) {
  Share scores = sum_blocks(facts, [](const LiveBlock& block) {
    const bool is_of_layer = !block.made.module.empty() || !block.saved_by.empty();  // else distances may be as square
    return is_of_layer && makes_attention_scores(block.made) && is_square(parse_shape(block.shape));
  });
  std::string shape;
  Where made{};
  const OutOfMemory* failed = failure(facts);
  const bool is_asked_for = failed != nullptr && asks_for_scores(failed->where);
  if (scores.largest != nullptr) {
    const int64_t bytes = scores.largest->requested_bytes;
    if (!has_product(facts, bytes) || (!is_of_attention(scores.made()) && !may_be_scores(facts, bytes))) return {};
    shape = fmt::format(", {}", scores.largest->shape);
    made = scores.made();
  } else if (failed != nullptr && (makes_attention_scores(failed->where) || is_asked_for) &&
             is_large(facts, failed->requested_bytes, 0.2)) {
    Square square = factor_shapes(facts, failed->requested_bytes, true);
    if (square.text.empty() && (is_asked_for || any_op(failed->where, {"aten::bmm"})))
      square = factor_heads(facts, failed->requested_bytes);
    const bool is_known = square.batched && (is_asked_for || has_product(facts, failed->requested_bytes));
    shape = is_known ? ", " + square.text : "";
    made = failed->where;
    scores.bytes = is_known ? square.bytes : find_scores_by_name(facts);
  }
  if (made.op.empty() || !is_large(facts, scores.bytes, 0.2)) return {};
  std::vector<std::string> lines{
      "y = F.scaled_dot_product_attention(q, k, v)  # of nn.MultiheadAttention: need_weights=False"};
  constexpr std::string_view kModels = "transformers/models/";
  if (contains(made.inner_source, kModels)) {
    const auto of_package = lines_in_framework("transformers", "fused_attention", {});
    if (of_package) lines.insert(lines.begin(), of_package->begin(), of_package->end());
  }
  const Referrer* const referrer = scores.largest == nullptr ? nullptr : facts.referrers.find(*scores.largest);
  const bool is_used_up =
      failed != nullptr && failed->no_grad && referrer != nullptr && referrer->variable.starts_with("variable ");
  if (is_used_up)
    lines.push_back(
        fmt::format("del {}  # else as soon as it has served: a name keeps its tensor until the function ends",
                    variable_name(referrer->variable)));
  return Reason{.text = fmt::format("attention without a fused kernel: scores of length × length{}{}, {} in all", shape,
                                    at(made), with_unit(scores.bytes)),
                .bytes = scores.bytes,
                .fix = "fused_attention",
                .how = std::move(lines)};
}

Found find_intermediate_of_product(const ReasonFacts& facts) {
  if (!fails_in(facts, {"aten::matmul", "aten::einsum"})) return {};
  const std::optional<Expansion> found = find_expansion(facts);
  const Where where = failed_in(facts);
  const bool multiplies_elements = where.op == "aten::einsum" && where.inner == "aten::mul";
  if (!found || !found->alike.empty() || (!multiplies_elements && !copies_operand(where))) return {};
  const std::string bytes = with_unit(requested_bytes(facts));
  return Reason{
      .text = multiplies_elements
                  ? fmt::format("{}{} multiplies two of its operands before it sums: their products take {}", where.op,
                                at(where), bytes)
                  : fmt::format("{}{} copies an operand for each row that it is multiplied with: {} of at most {}",
                                where.op, at(where), bytes, with_unit(found->largest_other_bytes)),
      .bytes = requested_bytes(facts),
      .fix = "enlarge_in_parts",
      .how = multiplies_elements
                 ? std::vector<std::string>{"y = a @ (b @ c)  # of three operands and more: in the order that stays "
                                            "small; opt_einsum finds it"}
                 : std::vector<std::string>{
                       "y = (x.transpose(0, 1) @ w).transpose(0, 1)  # one large product for each matrix, none copied",
                       "for part in x.split(1024): …  # or rows in chunks"}};
}

// Of several operands it multiplies two after the other, from left to right.
Found find_intermediates_of_einsum(const ReasonFacts& facts) {
  constexpr int64_t kMuchLarger = 8;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.op != "aten::einsum") return {};
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.made.op == "aten::einsum" && block.made.source == failed->where.source;
  });
  int64_t given = 0;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_operand = block.made.op != "aten::einsum" && block.category != Category::workspace;
    if (is_operand) given = std::max(given, block.bytes);
  }
  const int64_t bytes = made.bytes + failed->requested_bytes;
  const bool is_first = made.bytes * 4 < failed->requested_bytes;  // it may be the result
  if (is_first || failed->requested_bytes < kMuchLarger * given || !is_large(facts, bytes, 0.5)) return {};
  return Reason{
      .text = fmt::format("aten::einsum{} makes tensors of up to {} on its way, and no tensor that it is given has "
                          "more than {}: the order of its operands decides",
                          at(failed->where), with_unit(failed->requested_bytes), with_unit(given)),
      .bytes = bytes,
      .fix = "enlarge_in_parts",
      .how = {"# pip install opt_einsum: torch.einsum then takes the order that stays small; or the small "
              "operands first, as it goes from left to right"}};
}

Found find_all_pairs(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  const std::optional<Expansion> found = find_expansion(facts);
  const Where* maker = found ? found->find_maker(makes_pairs, keeps_size) : nullptr;
  // A tensor of that size which an earlier step made may be the operand.
  const bool was_before =
      found && std::ranges::any_of(found->alike, [&](const LiveBlock* block) { return block->step < failed->step; });
  const bool is_broadcast = found && !was_before && broadcasts(found->first) && !builds_graph(facts).value_or(false);
  if (maker == nullptr && is_broadcast) maker = &found->first;
  // A matrix of distances, and what is made of it as large as it is.
  const Share matrix = sum_blocks(facts, [&](const LiveBlock& block) {
    return makes_distances(block.made) && block.made.module == failed->where.module &&
           is_of_as_many(block.requested_bytes, failed->requested_bytes);
  });
  const bool are_distances = makes_distances(failed->where) || matrix.count > 0;
  const bool distances = are_distances && is_large(facts, failed->requested_bytes + matrix.bytes);
  const Where made_matrix = matrix.made();
  if (maker == nullptr && matrix.count > 0) maker = &made_matrix;
  if (!distances && (maker == nullptr || !found)) return {};
  const bool of_product = distances || found->has_op(multiplies);
  Square square = found ? factor_result(facts, *found, of_product) : Square{};
  if (square.text.empty() && found) square = factor_result(facts, *found, !of_product);
  if (square.text.empty() && !distances && !is_broadcast) return {};
  // Of how many a tensor is repeated for, sizes alone say nothing.
  if (found && found->has_op(repeats) && contains(square.text, "as large as") && find_repeated_tensor(facts)) return {};
  const bool is_copied = maker != nullptr && any_op(*maker, {"aten::clone", "aten::contiguous", "aten::cat"});
  if (is_copied && !square.has_width) return {};  // a copy of any matrix
  const Where& where = maker != nullptr ? *maker : failed->where;
  const int64_t bytes = found ? found->bytes : failed->requested_bytes;
  const std::string beside = beside_largest(facts, bytes);
  const bool is_guess = contains(square.text, "as large as") && contains(beside, "times as large");
  const std::string what = square.text.empty() || is_guess ? fmt::format("a result of {}{}", with_unit(bytes), beside)
                                                           : square.text + ", " + times_of_rows(sizes_in(square.text));
  std::vector<std::string> lines =
      lines_for_pairs(square, failed->where, of_product, fails_in_graph(facts).value_or(false));
  std::string others;  // the results of this line for several models or sets
  if (matrix.count > 1 && makes_distances(failed->where)) {
    others = fmt::format(", and {} as large of this line are alive", matrix.count);
    lines.emplace_back("for model in models: reduce(pairs(model))  # of several, one after the other");
  }
  const auto is_double = [&](const LiveBlock& block) {
    return is_data(block) && block.made.module.empty() && block.shape.ends_with(" float64");
  };
  if (sum_blocks(facts, is_double).count > 0 && !fails_in_graph(facts).value_or(false))
    lines.emplace_back("x = x.float()  # it is float64, as NumPy makes it: half of the memory");
  return Reason{.text = fmt::format("all pairs at once{}: {}{}", at(where), what, others),
                .bytes = bytes,
                .fix = "pairs_in_chunks",
                .how = std::move(lines)};
}

// [atoms, atoms - 1, features], [batch, tokens, tokens, features]: each of a set with each other one, in layers that keep many of them; or
// [batch, points, points] that a product made.
Found find_tensors_of_pairs(const ReasonFacts& facts) {
  constexpr int64_t kMany = 256;
  if (failure(facts) == nullptr) return {};
  Share pairs = sum_blocks(facts, [&](const LiveBlock& block) {
    const std::vector<int64_t> shape = is_data(block) ? parse_shape(block.shape) : std::vector<int64_t>();
    for (size_t i = 0; i + 2 < shape.size(); ++i) {  // not the last two: images, and scores of attention, are as square
      if (shape[i] >= kMany && (shape[i + 1] == shape[i] || shape[i + 1] + 1 == shape[i])) return true;
    }
    return is_square(shape) && !is_of_attention(block.made) && has_product(facts, block.requested_bytes);
  });
  if (pairs.largest == nullptr) return {};
  const LiveBlock* const largest = pairs.largest;
  // Shapes are known of few; what is as large is of its kind, as what was requested.
  if (is_square(parse_shape(largest->shape))) pairs = sum_alike(facts, largest->requested_bytes);
  if (pairs.count < 2 || !is_large(facts, pairs.bytes, 0.4)) return {};
  return Reason{
      .text = fmt::format("all pairs at once{}: {} tensors as {}, for each pair of rows, {} in all", at(largest->made),
                          pairs.count, largest->shape, with_unit(pairs.bytes)),
      .bytes = pairs.bytes,
      .fix = "pairs_in_chunks",
      .how = {"i, j = (distance < cutoff).nonzero(as_tuple=True)  # the pairs that count, in place of all of them",
              "parts = [f(part, b) for part in a.split(64)]  # under checkpoint(), where backward follows"}};
}

Found find_pairs_of_data(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !failed->where.module.empty() || !multiplies(failed->where)) return {};
  const std::optional<Expansion> found = find_expansion(facts);
  if (!found || !found->alike.empty() || factor_sizes(*found, failed->requested_bytes, true).text.empty()) return {};
  if (find_intermediate_of_product(facts)) return {};  // what fails is no result yet
  return find_all_pairs(facts);
}

Found find_indexed_pairs(const ReasonFacts& facts) {
  constexpr int64_t kMany = 1024;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.op != "aten::index") return {};
  const auto is_table = [&](const LiveBlock& block) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    if (block.pending_free || shape.size() != 2 || shape[0] < kMany || shape[1] <= 0) return false;
    // As many bytes for each row and each of as many indices as the table has of each element.
    return std::abs(failed->requested_bytes - block.requested_bytes / shape[1] * shape[0]) < kMinBlockBytes;
  };
  const auto table = std::ranges::find_if(facts.device.state.blocks, is_table);
  if (table == facts.device.state.blocks.end()) return {};
  const int64_t rows = parse_shape(table->shape)[0];
  const Referrer* const referrer = facts.referrers.find(*table);
  return Reason{
      .text = fmt::format("each of {0} indices is looked up in each of {0} rows{1}: [{0}, {0}] of {2}{3}, while "
                          "one of each row is on the diagonal",
                          rows, at(failed->where), referrer == nullptr ? "a tensor" : referrer->variable,
                          comma_shape(*table)),
      .bytes = failed->requested_bytes,
      .fix = "one_of_each_row"};
}

Found find_enlarged(const ReasonFacts& facts) {
  const std::optional<Expansion> found = find_expansion(facts);
  const auto follows = [](const Where& where) { return makes_pairs(where) || keeps_size(where); };
  const Where* maker = found ? found->find_maker(enlarges, follows) : nullptr;
  const bool may_train = trains(facts) && builds_graph(facts).value_or(true);
  if (maker != nullptr && (!maker->module.empty() || may_train)) maker = nullptr;
  // Of a batch that is selected, what follows is as large; in a layer rows are copied for edges.
  const bool may_be_batch = builds_graph(facts).value_or(false) && found && found->first.module.empty();
  if (maker == nullptr && found && gathers(found->first) && !may_be_batch) maker = &found->first;
  if (maker == nullptr) return {};
  return Reason{.text = fmt::format("{}{} makes {} at once, of tensors of at most {}", maker->op, at(*maker),
                                    with_unit(found->bytes), with_unit(found->largest_other_bytes)),
                .bytes = found->bytes,
                .fix = "enlarge_in_parts",
                .how = lines_for_enlarged(*maker)};
}

}  // namespace oomdiag
