#include "profiler/explain/reasons.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <tuple>

#include "profiler/explain/bytes_text.h"
#include "profiler/explain/fix_rules.h"
#include "profiler/explain/shape.h"
#include "profiler/one_of.h"

// The second level of a cause: which habit of a program is behind the bytes. Each row of kReasons asks one question of the
// recorded facts; the first that holds is the reason. A row that only may be true is not said.

namespace oomdiag {
namespace {

using Found = std::optional<Reason>;

int64_t needed_bytes(const ReasonFacts& f) {
  return f.device.moment.allocated_bytes + f.device.failure->requested_bytes;
}

/// Worth naming: a fifth of what the device would have held.
bool is_large(const ReasonFacts& f, int64_t bytes) { return bytes * 5 >= needed_bytes(f); }

/// What is read of one line of a stack, "train.py:68 in evaluate".
struct Call {
  std::string_view line{}, function{};
};

std::vector<Call> list_calls(std::string_view stack) {
  constexpr std::string_view kIn = " in ";
  std::vector<Call> calls;
  while (!stack.empty()) {
    const std::string_view text = stack.substr(0, stack.find('\n'));
    stack.remove_prefix(std::min(text.size() + 1, stack.size()));
    const size_t in = text.rfind(kIn);
    if (in == text.npos) continue;
    const std::string_view path = text.substr(0, in);
    calls.push_back({.line = path.substr(path.rfind('/') + 1), .function = text.substr(in + kIn.size())});
  }
  return calls;
}

bool is_evaluation(std::string_view function) {
  constexpr std::array<std::string_view, 5> kBeginnings = {"eval", "valid", "test", "predict", "infer"};
  while (function.starts_with('_')) function.remove_prefix(1);
  const bool begins =
      std::ranges::any_of(kBeginnings, [&](std::string_view word) { return function.starts_with(word); });
  return begins || function.find("evaluat") != function.npos || function.find("validat") != function.npos;
}

/// What autograd keeps of forward passes of the step that failed.
struct KeptPasses {
  int64_t bytes = 0;
  int64_t count = 0;  ///< of equal tensors that one op of one module made: the forward passes
};

KeptPasses count_passes(const ReasonFacts& f) {
  std::map<std::tuple<std::string_view, std::string_view, std::string_view, std::string_view>, int64_t> counts;
  KeptPasses kept;
  for (const LiveBlock& block : f.device.moment.blocks) {
    const bool saved = block.category == Category::activation && block.phase == Phase::forward && !block.pending_free;
    if (!saved || block.step != f.device.failure->step) continue;
    kept.bytes += block.bytes;
    if (block.made.module.empty()) continue;
    const int64_t count = ++counts[{block.made.module, block.made.op, block.made.source, block.shape}];
    kept.count = std::max(kept.count, count);
  }
  return kept;
}

// In evaluation nobody runs backward, so each forward pass whose results live keeps its graph.
Found keeps_graphs_in_evaluation(const ReasonFacts& f) {
  constexpr int64_t kFewestPasses = 3;
  const OutOfMemory& failure = *f.device.failure;
  if (failure.phase != Phase::forward && failure.phase != Phase::other) return {};
  const KeptPasses kept = count_passes(f);
  if (!is_large(f, kept.bytes)) return {};
  const std::vector<Call> calls = list_calls(failure.stack);
  const auto call = std::ranges::find_if(calls, [](const Call& one) { return is_evaluation(one.function); });
  const bool never_trains = f.device.attribution.backward_bytes == 0 && kept.count >= kFewestPasses;
  if (call == calls.end() && !never_trains) return {};
  const std::string place =
      call == calls.end() ? short_place(failure.where) : fmt::format("{}(), {}", call->function, call->line);
  const std::string passes = kept.count > 1 ? fmt::format("{} forward passes", kept.count) : "a forward pass";
  return Reason{.id = {},
                .text = fmt::format("evaluation keeps autograd graphs: {} that no backward follows hold {} ({})",
                                    passes, with_unit(kept.bytes), place),
                .bytes = kept.bytes,
                .fix = "no_grad_in_evaluation",
                .how = {fmt::format("with torch.no_grad():  # around the loop of {}", place)}};
}

Found keeps_several_passes(const ReasonFacts& f) {
  constexpr int64_t kFewestPasses = 4;
  const OutOfMemory& failure = *f.device.failure;
  const KeptPasses kept = count_passes(f);
  const bool trained = f.device.attribution.backward_bytes > 0;
  if (failure.phase != Phase::forward || !trained || kept.count < kFewestPasses || !is_large(f, kept.bytes)) return {};
  return Reason{.id = {},
                .text = fmt::format("{} forward passes before one backward: their graphs hold {} ({})", kept.count,
                                    with_unit(kept.bytes), short_place(failure.where)),
                .bytes = kept.bytes,
                .fix = "backward_of_each_pass"};
}

// --- growth

bool is_recurrent(const Where& where) {
  const auto has = [&](std::string_view word) { return where.op.find(word) != where.op.npos; };
  return has("lstm") || has("gru") || has("rnn");
}

Found state_is_not_detached(const ReasonFacts& f) {
  for (const Growth& growth : f.growths) {
    const auto place =
        std::ranges::find_if(growth.places, [](const GrowingPlace& one) { return is_recurrent(one.where); });
    if (place == growth.places.end() || !is_large(f, growth.grown_bytes)) continue;
    const std::string line = short_place(place->where);
    return Reason{
        .id = {},
        .text = fmt::format("recurrent state is not detached: each step keeps the graph of all before it, {} per "
                            "step ({})",
                            with_unit(growth.bytes_per_step), line),
        .bytes = growth.grown_bytes,
        .fix = "detach_state",
        .how = {fmt::format("state = state.detach()  # behind {}; of an LSTM both: (h.detach(), c.detach())", line)}};
  }
  return {};
}

bool is_of_attention(const Where& where) {
  const auto names = [](std::string_view name) {
    return name.find("attn") != name.npos || name.find("ttention") != name.npos ||
           name.find("cache_utils") != name.npos;
  };
  return names(where.module) || names(where.inner_source);
}

Found buffer_grows(const ReasonFacts& f, bool of_attention) {
  for (const Growth& growth : f.growths) {
    if (growth.kind != GrowthKind::growing_buffer || growth.held.op != "aten::cat") continue;
    if (is_of_attention(growth.held) != of_attention) continue;
    const std::string line = short_place(growth.held);
    if (of_attention) {
      return Reason{.id = {},
                    .text = fmt::format("the key-value cache grows with each token, {} per step ({})",
                                        with_unit(growth.bytes_per_step), line),
                    .bytes = growth.grown_bytes,
                    .fix = "smaller_cache"};
    }
    return Reason{.id = {},
                  .text = fmt::format("results are concatenated on the GPU, {} more per step ({})",
                                      with_unit(growth.bytes_per_step), line),
                  .bytes = growth.grown_bytes,
                  .fix = "results_to_host"};
  }
  return {};
}

// --- one op that makes much

/// "200000 × 4000" of a request of so many bytes: rows of two tensors in use. Empty where no two fit.
std::string factor(const ReasonFacts& f) {
  constexpr int64_t kFloat = 4, kFewestRows = 64, kMostTensors = 64;
  std::vector<int64_t> rows;
  for (const LiveBlock& block : f.device.moment.blocks) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    if (shape.size() < 2 || shape.front() < kFewestRows || std::ssize(rows) >= kMostTensors) continue;
    if (std::ranges::find(rows, shape.front()) == rows.end()) rows.push_back(shape.front());
  }
  const int64_t requested = f.device.failure->requested_bytes;
  for (const int64_t a : rows) {
    for (const int64_t b : rows) {
      const int64_t bytes = a * b * kFloat;
      if (bytes <= requested && requested - bytes < 2 * kMiB) return fmt::format("{} rows × {} rows", a, b);
    }
  }
  return {};
}

Found compares_all_pairs(const ReasonFacts& f) {
  constexpr std::array<std::string_view, 4> kProducts = {"aten::matmul", "aten::mm", "aten::sub", "aten::mul"};
  const OutOfMemory& failure = *f.device.failure;
  const std::string pairs = factor(f);
  const bool distances = failure.where.op == "aten::cdist";
  const bool product = is_one_of(failure.where.op, kProducts) && failure.where.module.empty() && !pairs.empty();
  if ((!distances && !product) || !is_large(f, failure.requested_bytes)) return {};
  return Reason{.id = {},
                .text = fmt::format("all pairs at once: {}{} are {} ({})", pairs.empty() ? "" : pairs + " of ",
                                    failure.where.op.substr(failure.where.op.rfind(':') + 1),
                                    with_unit(failure.requested_bytes), short_place(failure.where)),
                .bytes = failure.requested_bytes,
                .fix = "pairs_in_chunks"};
}

Found makes_full_matrices(const ReasonFacts& f) {
  const OutOfMemory& failure = *f.device.failure;
  if (failure.where.op != "aten::linalg_svd" || !is_large(f, failure.requested_bytes)) return {};
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(failure.requested_bytes) / 4));
  return Reason{.id = {},
                .text = fmt::format("full_matrices=True, SVD's default, makes a square matrix of about {} × {} ({})",
                                    side, side, short_place(failure.where)),
                .bytes = failure.requested_bytes,
                .fix = "reduced_svd"};
}

Found makes_dense_gradients(const ReasonFacts& f) {
  const OutOfMemory& failure = *f.device.failure;
  if (!failure.where.node.starts_with("Embedding") || !is_large(f, failure.requested_bytes)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("the gradient of an embedding is as large as its table, {}, however few rows were used "
                          "({})",
                          with_unit(failure.requested_bytes), short_place(failure.where)),
      .bytes = failure.requested_bytes,
      .fix = "sparse_embedding"};
}

Found computes_in_float64(const ReasonFacts& f) {
  int64_t bytes = 0;
  for (const LiveBlock& block : f.device.moment.blocks) bytes += block.shape.ends_with(" float64") ? block.bytes : 0;
  if (bytes * 2 < needed_bytes(f)) return {};
  return Reason{.id = {},
                .text = fmt::format("float64: {} are of double precision, twice as much as float32", with_unit(bytes)),
                .bytes = bytes,
                .fix = "float32"};
}

struct ReasonRow {
  std::string_view id;
  Found (*find)(const ReasonFacts& facts);
};

constexpr ReasonRow kReasons[] = {
    {"evaluation_keeps_graphs", keeps_graphs_in_evaluation},
    {"recurrent_state", state_is_not_detached},
    {"key_value_cache", [](const ReasonFacts& f) { return buffer_grows(f, true); }},
    {"growing_buffer", [](const ReasonFacts& f) { return buffer_grows(f, false); }},
    {"full_matrices", makes_full_matrices},
    {"all_pairs", compares_all_pairs},
    {"dense_embedding_gradients", makes_dense_gradients},
    {"float64", computes_in_float64},
    {"several_forward_passes", keeps_several_passes},
};

}  // namespace

std::optional<Reason> find_reason(const ReasonFacts& facts) {
  if (!facts.device.failure) return {};
  for (const ReasonRow& row : kReasons) {
    if (Found reason = row.find(facts)) {
      reason->id = row.id;
      return reason;
    }
  }
  return {};
}

}  // namespace oomdiag
