#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "profiler/explain/facts/variable_counts.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/fold_indices.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"

// Rows of kReasons about results of layers that stay without a graph: of every layer, as of output_hidden_states=True, and of a cache
// that each step makes anew. And of ops in a graph that no module called, and no backward follows.

namespace oomdiag {
namespace {

/// Whether it is of one of a list of equal layers: "layers.3", "model.blocks.3.mlp".
bool is_of_numbered_layer(std::string_view module) { return fold_indices(module) != module; }

}  // namespace

Found find_results_of_each_layer(const ReasonFacts& facts) {
  constexpr size_t kFewest = 4;
  constexpr double kWorth = 0.25;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::forward || !is_of_numbered_layer(failed->where.module)) return {};
  if (fails_in_graph(facts).value_or(true)) return {};
  const std::string layers = fold_indices(failed->where.module);
  std::set<std::string_view> modules;
  VariableCounts keepers;
  const Share results = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_result = block.category == Category::output && block.step == failed->step && !joins(block.made) &&
                           is_of_numbered_layer(block.made.module) && block.saved_by.empty();
    const Referrer* const referrer = facts.referrers.find(block);
    const bool is_captured =
        referrer != nullptr && contains(referrer->variable, "(transformers/utils/output_capturing.py");
    if (!is_result || (!is_captured && !layers.starts_with(fold_indices(block.made.module)))) return false;
    modules.insert(block.made.module);
    if (referrer != nullptr && is_container(referrer->variable)) keepers.add(referrer->variable, 1);
    return true;
  });
  // One of each: what a layer works on is freed before the next one.
  if (modules.size() < kFewest || results.count > static_cast<int64_t>(modules.size()) * 3 / 2) return {};
  if (!is_large(facts, results.bytes, kWorth)) return {};
  const bool one_keeps_most = keepers.count_of_most() * 2 > results.count;
  return Reason{
      .text = fmt::format("a result of each of {} layers is kept: {} of '{}'{}{}{}", modules.size(),
                          with_unit(results.bytes), fold_indices(results.largest->made.module), at(results.made()),
                          comma_shape(*results.largest), one_keeps_most ? fmt::format(", by {}", keepers.most()) : ""),
      .bytes = results.bytes,
      .fix = "results_of_used_layers"};
}

Found find_cache_made_anew(const ReasonFacts& facts) {
  constexpr int64_t kFewest = 4;
  constexpr double kWorth = 0.15;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !joins(failed->where) || failed->where.module.empty() || failed->step < 2) return {};
  if (fails_in_graph(facts).value_or(true)) return {};
  const auto is_of_line = [&](const LiveBlock& block) {
    return joins(block.made) && block.made.source == failed->where.source && is_data(block);
  };
  const Share old =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_of_line(block) && block.step < failed->step; });
  const Share fresh =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_of_line(block) && block.step == failed->step; });
  if (old.count < kFewest || fresh.count < kFewest || !is_large(facts, old.bytes, kWorth)) return {};
  const Referrer* const referrer = facts.referrers.find(*old.largest);
  return Reason{
      .text = fmt::format("{}{} makes a cache anew while that of the step before is still there: {} of it, and {} of "
                          "the new one so far",
                          failed->where.op, at(failed->where), with_unit(old.bytes), with_unit(fresh.bytes)),
      .bytes = old.bytes,
      .kept_by = variable_of(referrer),
      .fix = "cache_in_place"};
}

// A model whose methods are called, and not the module itself, has no layers to tell passes by. Where no optimizer is, nothing learns.
Found find_graph_without_layers(const ReasonFacts& facts) {
  constexpr double kWorth = 0.2;  // what nodes save besides is not known before the graph is walked
  constexpr int64_t kFewestTurns = 16;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase == Phase::backward || failed->no_grad) return {};
  if (expects_backward(facts) || wants_gradient_of_data(facts)) return {};
  if (facts.device.attribution.backward_bytes > 0) return {};
  int64_t bytes = 0;
  std::map<std::string_view, int64_t> turns;  // by line
  for (const StepAllocation& block : facts.device.step_allocations.blocks) {
    const bool lives = block.is_of_step() && block.in_graph && block.died == StepAllocation::kNever;
    if (!lives || !block.made.module.empty()) continue;
    bytes += block.bytes;
    ++turns[block.made.source];
  }
  const auto most = std::ranges::max_element(turns, {}, [](const auto& entry) { return entry.second; });
  if (most == turns.end() || most->second < kFewestTurns || !is_large(facts, bytes, kWorth)) return {};
  return Reason{
      .text = fmt::format("a loop keeps autograd graphs: no backward has followed, and no optimizer is there; "
                          "{} results of one line alone live, and all hold at least {}{}",
                          most->second, with_unit(bytes), at(failed->where)),
      .bytes = bytes,
      .fix = "no_grad_in_evaluation",
      .how = {fmt::format("with torch.no_grad():  # around the call that leads to {}, if nothing learns from it",
                          short_place(failed->where))}};
}

}  // namespace oomdiag
