#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"

// Rows of kReasons about large tensors that the program itself makes: rows copied by an index, rows of a table, an index for each
// element, tensors of as many rows side by side, one large result, a dense matrix, square matrices, gradients of samples.

namespace oomdiag {
namespace {

/// What layers of networks make.
bool makes_layer(const Where& where) {
  return where.op.find("conv") != where.op.npos || where.op.find("norm") != where.op.npos ||
         any_op(where, {"aten::linear", "aten::addmm", "aten::relu", "aten::silu", "aten::gelu", "aten::embedding",
                        "aten::dropout", "aten::softmax", "aten::scaled_dot_product_attention"});
}

constexpr const char* kInParts =
    "parts = [f(part) for part in x.split(1024)]  # and reduce each part, or .cpu(), before the next";

std::vector<std::string> lines_for_large_result(const Where& where) {
  if (any_op(where, {"aten::contiguous", "aten::clone", "aten::reshape"}))
    return {"x.unfold(1, size, step)  # is a view: a copy only of the windows that are used, or a larger step",
            kInParts};
  if (joins(where))
    return {
        "out = torch.empty(rows, width)  # filled part by part: a list and what cat() makes of it are there at once",
        "parts.append(part.cpu())  # or on the host"};
  if (any_op(where, {"aten::roll", "aten::flip"}))
    return {"x[:, 0] = x[:, 1]; x[:, 1] = y  # shifted in place: roll() and flip() make a second one as large",
            kInParts};
  if (any_op(where, {"aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax", "aten::sigmoid"}))
    return {"labels = scores.argmax(1)  # needs no softmax before it; else part by part: x.split(16)"};
  if (any_op(where, {"aten::einsum", "aten::matmul", "aten::bmm", "aten::mm"}))
    return {"y = a @ (b @ c)  # two operands at a time, in the order that stays small; or rows in parts"};
  // Inside of most ops something is empty at first.
  if (makes_values(where) ||
      is_one_of(where.op, {"aten::zeros_like", "aten::ones_like", "aten::empty_like", "aten::full_like"}))
    return {
        "x = torch.zeros(…)  # of fewer or smaller dimensions, as only the diagonal; in half precision, or on the "
        "host"};
  return {kInParts};
}

}  // namespace

// Features of edges, copied from those of nodes, stay for the rest of the forward pass, and what follows fails.
Found find_gathered_rows(const ReasonFacts& facts) {
  constexpr int64_t kSeveral = 3;
  const Share rows = sum_blocks(facts, [&](const LiveBlock& block) { return is_data(block) && gathers(block.made); });
  if (failure(facts) == nullptr || rows.largest == nullptr || !is_large(facts, rows.bytes, 0.4)) return {};
  const Share others = sum_blocks(facts, [&](const LiveBlock& block) {
    return is_data(block) && !gathers(block.made) && block.bytes * kSeveral <= rows.largest->bytes;
  });
  if (others.largest == nullptr || rows.largest->bytes < kSeveral * others.largest->bytes) return {};
  const std::string shape(rows.largest->shape);
  return Reason{.text = fmt::format("{}{} copies rows: {}{} of at most {}", rows.made().op, at(rows.made()),
                                    with_unit(rows.bytes), shape.empty() ? "" : ", as " + shape + ",",
                                    with_unit(others.largest->bytes)),
                .bytes = rows.bytes - others.largest->bytes,
                .fix = "enlarge_in_parts",
                .how = {lines_for_rows().front(),
                        "x = linear(x)[index]  # a layer that makes rows narrower before they are copied, not after"}};
}

// A table with a large row for each of a few kinds, looked up for each item: matrices of edges, filters of pixels.
Found find_copied_rows_of_table(const ReasonFacts& facts) {
  constexpr int64_t kManyTimes = 64;
  std::map<std::string_view, const LiveBlock*> parameters;  // by name
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.category == Category::parameter) parameters.emplace(block.name, &block);
  }
  const auto table_of = [&](const Where& made) -> const LiveBlock* {
    if (!any_op(made, {"aten::embedding"})) return nullptr;
    const auto found = parameters.find(fmt::format("{}.weight", made.module));
    return found == parameters.end() ? nullptr : found->second;
  };
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  const Share rows = sum_blocks(facts, [&](const LiveBlock& block) {
    const LiveBlock* const table = table_of(block.made);
    return is_data(block) && table != nullptr && block.bytes >= kManyTimes * table->bytes;
  });
  const LiveBlock* const asked_of = table_of(failed->where);
  const bool asks = asked_of != nullptr && failed->requested_bytes >= kManyTimes * asked_of->bytes;
  const int64_t bytes = rows.bytes + (asks ? failed->requested_bytes : 0);
  if (!is_large(facts, bytes, 0.4)) return {};
  const Where made = rows.largest != nullptr ? rows.made() : failed->where;
  const LiveBlock& table = *table_of(made);
  return Reason{
      .text = fmt::format("{}{} copies a row of {}{} for each of its indices: {} of {}", made.op, at(made), table.name,
                          table.shape.empty() ? "" : fmt::format(" {}", table.shape), with_unit(bytes),
                          with_unit(table.bytes)),
      .bytes = bytes,
      .fix = "enlarge_in_parts",
      .how = {"for kind, row in enumerate(table): y[index == kind] = f(x[index == kind], row)  # one for each "
              "row of the table",
              lines_for_rows().front()}};
}

Found find_wide_index(const ReasonFacts& facts) {
  const Share indices = sum_blocks(facts, [&](const LiveBlock& block) {
    return is_data(block) && block.shape.ends_with("int64") && parse_shape(block.shape).size() >= 2;
  });
  const bool selects = fails_in(facts, {"aten::gather", "aten::scatter", "aten::scatter_add", "aten::scatter_reduce",
                                        "aten::take_along_dim", "aten::index_put"});
  if (!selects || indices.largest == nullptr || !is_large(facts, indices.bytes)) return {};
  const Referrer* const referrer = facts.referrers.find(*indices.largest);
  return Reason{
      .text = fmt::format("an index of 64 bits for each element{}: {} {}, {}", at(indices.made()),
                          referrer == nullptr ? "a tensor of" : referrer->variable, indices.largest->shape,
                          with_unit(indices.bytes)),
      .bytes = indices.bytes,
      .fix = "enlarge_in_parts",
      .how = {"x[index]  # one index for each row, in place of gather() with an index that is expanded to its columns",
              "for part in index.split(1024): f(x[part])  # and reduce each part before the next"}};
}

Found find_large_result(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer || failed->phase == Phase::backward) return {};
  const Where& where = failed->where;
  const bool is_of_layer = !where.module.empty() || !where.node.empty() || where.op.empty() || is_copy(where.op);
  if (is_of_layer || builds_graph(facts).value_or(false) || !is_large(facts, failed->requested_bytes)) return {};
  const int64_t parameters = sum_category(facts, Category::parameter).bytes;
  const bool is_of_model = std::abs(failed->requested_bytes - parameters) * 20 < parameters;
  return Reason{.text = fmt::format("one tensor of {}{}: {}{} makes it at once{}", with_unit(failed->requested_bytes),
                                    is_of_model ? ", as much as all parameters take" : "", where.op, at(where),
                                    beside_largest(facts, failed->requested_bytes)),
                .bytes = failed->requested_bytes,
                .fix = "smaller_result",
                .how = lines_for_large_result(where)};
}

// In a comprehension, say: no variable leads to its list before it is whole.
Found find_tensors_of_loop(const ReasonFacts& facts) {
  constexpr int64_t kFewest = 3;
  const OutOfMemory* failed = failure_outside_of_layers(facts);
  if (failed == nullptr || failed->where.source.empty()) return {};
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) {
    return is_data(block) && is_same_call(block.made, failed->where) &&
           block.requested_bytes == failed->requested_bytes;
  });
  if (made.count < kFewest || !is_large(facts, made.bytes, 0.5)) return {};
  return Reason{.text = fmt::format("{}{} runs again and again, and all that it makes stays: {} tensors of {} so far",
                                    failed->where.op, at(failed->where), made.count, with_unit(made.largest->bytes)),
                .bytes = made.bytes,
                .fix = "results_to_host",
                .how = {"results.append(x.cpu())  # or of each only what is used, as a mean; or fewer of them"},
                .piles_up = true};
}

// A tensor of the program's own for each pixel of each image, say: all that is as large in all dimensions but the last.
Found find_equal_rows(const ReasonFacts& facts) {
  constexpr int64_t kSeveral = 3, kManyRows = 10'000;
  if (failure(facts) == nullptr || failure(facts)->phase == Phase::backward) return {};
  std::map<std::vector<int64_t>, Share> alike;
  for (const LiveBlock& block : facts.device.state.blocks) {
    std::vector<int64_t> shape = parse_shape(block.shape);
    const bool is_of_layer = block.made.module.find('.') != block.made.module.npos || makes_layer(block.made);
    if (!is_data(block) || is_of_layer || shape.size() < 3) continue;
    shape.pop_back();
    int64_t rows = 1;
    for (const int64_t size : shape) rows *= size;
    if (rows >= kManyRows) alike[std::move(shape)].add(block);
  }
  const auto most = std::ranges::max_element(alike, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == alike.end() || most->second.count < kSeveral || !is_large(facts, most->second.bytes, 0.5)) return {};
  const auto& [shape, rows] = *most;
  return Reason{.text = fmt::format("{} tensors of {} rows are there at once, the largest{}: {} in all", rows.count,
                                    fmt::join(shape, " × "), at(rows.made()), with_unit(rows.bytes)),
                .bytes = rows.bytes - rows.bytes / rows.count,
                .fix = "enlarge_in_parts",
                .how = {"x = x[:, chosen]  # the rows that are used in the end, before anything is computed of all",
                        lines_for_rows().front()}};
}

// A whole series, say: moved to the GPU, normalized, predicted, and all of these are there at once.
Found find_data_several_times(const ReasonFacts& facts) {
  constexpr size_t kSeveral = 3, kMaxLines = 5;
  constexpr int64_t kNearly = 50;  // a part that they may differ by
  if (failure_outside_of_layers(facts) == nullptr || builds_graph(facts).value_or(false)) return {};
  std::map<std::string_view, Share> lines;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (is_data(block) && !block.pending_free && !block.made.source.empty()) lines[block.made.source].add(block);
  }
  std::vector<Share> shares;
  for (const auto& [line, share] : lines) shares.push_back(share);
  std::ranges::sort(shares, std::greater<>(), &Share::bytes);
  const auto end = std::ranges::find_if(
      shares, [&](const Share& one) { return (one.bytes + one.bytes / kNearly) < shares.front().bytes; });
  const auto count = static_cast<size_t>(end - shares.begin());
  if (count < kSeveral) return {};
  const int64_t bytes = shares.front().bytes * static_cast<int64_t>(count);
  if (!is_large(facts, bytes, 0.5)) return {};
  shares.resize(std::min(count, kMaxLines));
  std::ranges::sort(shares, {}, [](const Share& one) { return one.largest->born; });
  std::vector<std::string> places;
  for (const Share& one : shares) places.push_back(short_place(one.made()));
  return Reason{
      .text = fmt::format("the same data are on the GPU {} times, as lines made them of one another: {} each ({})",
                          count, with_unit(shares.front().bytes), fmt::join(places, ", ")),
      .bytes = bytes - bytes / static_cast<int64_t>(count),
      .fix = "split_batch",
      .how = {"for part in data.split(64): …  # a part at a time through all of these lines: of a long series a "
              "window, and the last state goes on; its results to the host",
              "del x  # each as soon as the next one is made of it"}};
}

// What is left to say where one tensor of the program is much of all.
Found find_largest_tensor(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || builds_graph(facts).value_or(false)) return {};
  const Share named = sum_blocks(facts, [&](const LiveBlock& block) {
    const Referrer* const referrer = facts.referrers.find(block);
    return is_data(block) && block.made.module.empty() && referrer != nullptr && module_of(referrer).empty();
  });
  if (named.largest == nullptr || !is_large(facts, named.largest->bytes)) return {};
  const LiveBlock& largest = *named.largest;
  const Referrer& referrer = *facts.referrers.find(largest);
  const std::string_view name = variable_name(referrer.variable);
  const bool is_wide = largest.shape.ends_with(" float32") && makes_values(largest.made);
  return Reason{.text = fmt::format(
                    "{} has {} of it{}{}", referrer.variable, with_unit(largest.bytes), comma_shape(largest),
                    largest.made.op.empty() ? "" : fmt::format(", made by {}{}", largest.made.op, at(largest.made))),
                .bytes = largest.bytes,
                .fix = "smaller_result",
                .how = {fmt::format(
                    "{}  # {}on the host, as device=\"cpu\" or .cpu(), and only parts of it on the GPU; or smaller",
                    name.empty() ? "x" : name,
                    is_wide ? "dtype=torch.uint8 or float16, if what is put into it has no more; or " : "")}};
}

Found find_dense_matrix(const ReasonFacts& facts) {
  const auto is_dense = [](const Where& where) {
    return any_op(where, {"aten::to_dense", "aten::_to_dense", "aten::eye", "aten::diag_embed", "aten::diag"});
  };
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) { return is_dense(block.made); });
  const OutOfMemory* failed = failure(facts);
  const bool fails = failed != nullptr && is_dense(failed->where);
  const int64_t bytes = made.bytes + (fails ? failed->requested_bytes : 0);
  if (!is_large(facts, bytes)) return {};
  const Where where = made.largest != nullptr ? made.made() : failed_in(facts);
  return Reason{.text = fmt::format("a dense matrix of n × n{}: {}, mostly zeros", at(where), with_unit(bytes)),
                .bytes = bytes,
                .fix = "stay_sparse",
                .how = where.op == "aten::eye"
                           ? std::vector<std::string>{"y = nn.Embedding(n, width).weight  # in place of a Linear layer "
                                                      "of rows that are one-hot",
                                                      "torch.diagonal(matrix).add_(1)  # or y + x: an identity that is "
                                                      "added needs no matrix"}
                           : std::vector<std::string>()};
}

namespace {

/// Tensors of n × n that are there at once, the requested one among them.
struct SquareMatrices {
  int64_t rows = 0, count = 0, bytes = 0;
  const LiveBlock* largest = nullptr;  ///< of those whose shape is known
};

/// Those that fill half of the memory; nothing where they do not.
std::optional<SquareMatrices> find_squares(const ReasonFacts& facts) {
  constexpr int64_t kLeastRows = 1000;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::optimizer || makes_layer(failed->where)) return {};
  if (is_of_attention(failed->where) && any_op(failed->where, {"aten::matmul", "aten::bmm", "aten::softmax"}))
    return {};  // its scores, and not the mask beside them
  SquareMatrices found;
  const Share named = sum_blocks(facts, [&](const LiveBlock& block) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    const bool is_square = is_data(block) && shape.size() == 2 && shape[0] == shape[1] && shape[0] >= kLeastRows;
    if (is_square) found.rows = std::max(found.rows, shape[0]);
    return is_square && !makes_layer(block.made);
  });
  if (named.largest == nullptr) return {};
  const Share all = sum_alike(facts, named.largest->requested_bytes);
  found.bytes = all.bytes;
  found.count = all.count;
  found.largest = named.largest;
  if (found.count < 2 || !is_large(facts, found.bytes, 0.5)) return {};
  return found;
}

}  // namespace

// Matrices that are full of zeros or of one value for each pair: an adjacency, a Laplacian, a mask, a kernel.
Found find_square_matrices(const ReasonFacts& facts) {
  constexpr int64_t kMany = 8;  // of one line: a loop, whatever it makes
  const std::optional<SquareMatrices> found = find_squares(facts);
  if (!found || is_of_attention(failed_in(facts))) return {};
  if (found->count >= kMany && is_same_call(found->largest->made, failed_in(facts))) return {};
  const Referrer* const referrer = facts.referrers.find(*found->largest);
  return Reason{.text = fmt::format("{0} dense matrices of {1} × {1} at once{2}: {3}{4}", found->count, found->rows,
                                    at(failed_in(facts)), with_unit(found->bytes),
                                    referrer == nullptr ? "" : fmt::format(", one of them {}", referrer->variable)),
                .bytes = found->bytes - found->bytes / found->count,
                .fix = "fewer_matrices"};
}

Found find_long_attention(const ReasonFacts& facts) {
  const std::optional<SquareMatrices> found = find_squares(facts);
  if (!found || !is_of_attention(failed_in(facts))) return {};
  return Reason{.text = fmt::format("attention over a length of {}: {} tensors of length × length, as scores, masks or "
                                    "biases of positions{}: {}",
                                    found->rows, found->count, at(failed_in(facts)), with_unit(found->bytes)),
                .bytes = found->bytes / 4 * 3,
                .fix = "shorter_sequences"};
}

// As opacus and vmap() make them: for each sample a gradient as large as the weight.
Found find_gradients_of_samples(const ReasonFacts& facts) {
  constexpr int64_t kSeveral = 8;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::backward) return {};
  std::set<int64_t> samples;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const std::vector<int64_t> shape = is_data(block) ? parse_shape(block.shape) : std::vector<int64_t>();
    if (shape.size() >= 2 && shape[0] >= kSeveral) samples.insert(shape[0]);
  }
  for (const LiveBlock& weight : facts.device.state.blocks) {
    if (weight.category != Category::parameter || parse_shape(weight.shape).size() < 2) continue;
    const int64_t count = weight.requested_bytes > 0 ? failed->requested_bytes / weight.requested_bytes : 0;
    const bool is_whole = count * weight.requested_bytes == failed->requested_bytes;
    if (!is_whole || !samples.contains(count) || !is_large(facts, failed->requested_bytes, 0.2)) continue;
    return Reason{.text = fmt::format("gradients of each sample{}: {} of {} {}, {} at once", at(failed->where), count,
                                      weight.name.empty() ? "a weight" : weight.name, weight.shape,
                                      with_unit(failed->requested_bytes)),
                  .bytes = failed->requested_bytes,
                  .fix = "samples_in_parts"};
  }
  return {};
}

}  // namespace oomdiag
