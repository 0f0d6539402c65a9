#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about tensors of the step, the attempt or the turn of a loop before, which its variables still have.

namespace oomdiag {
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

namespace {

/// Of the program's own variables, each once, at most three.
void add_name(std::string_view name, std::vector<std::string_view>& names) {
  constexpr size_t kMaxNames = 3;
  const bool is_known = name.empty() || std::ranges::find(names, name) != names.end();
  if (!is_known && names.size() < kMaxNames) names.push_back(name);
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
