#include "profiler/explain/reason_evidence.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/fix_rules.h"
#include "profiler/explain/growth.h"
#include "profiler/explain/reason_rules.h"
#include "profiler/explain/reasons.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"

namespace oomdiag {

std::string at(const Where& where) {
  const std::string place = where.source.empty() ? std::string() : short_place(where);
  return place.empty() ? std::string() : " at " + place;
}

std::string comment_at(const Where& where) {
  const std::string place = at(where);
  return place.empty() ? std::string() : "  #" + place;
}

void Share::add(const LiveBlock& block) {
  bytes += block.bytes;
  ++count;
  if (largest == nullptr || block.bytes > largest->bytes) largest = &block;
}

const Growth* leading_growth(const ReasonFacts& facts) {
  const bool large = !facts.growths.empty() && (is_large(facts, facts.growths.front().grown_bytes, 0.2) ||
                                                is_large(facts, sum_grown(facts.growths), 0.4));
  return large || (failure(facts) == nullptr && !facts.growths.empty()) ? &facts.growths.front() : nullptr;
}

bool learns(const ReasonFacts& facts) {
  const auto& step = facts.device.step_allocations.blocks;
  return trains(facts) || facts.device.attribution.backward_bytes > 0 ||
         std::ranges::any_of(step, [](const StepAllocation& block) { return block.in_graph; });
}

std::optional<bool> builds_graph(const ReasonFacts& facts) {
  const auto& step = facts.device.step_allocations.blocks;
  if (std::ranges::any_of(step, [](const StepAllocation& block) { return block.is_of_step() && block.in_graph; })) {
    return true;
  }
  const bool is_shown = std::ranges::any_of(
      step, [](const StepAllocation& block) { return block.is_of_step() && !block.made.module.empty(); });
  return is_shown ? std::optional(false) : std::nullopt;
}

bool fails_in(const ReasonFacts& facts, std::initializer_list<std::string_view> ops) {
  const OutOfMemory* failed = failure(facts);
  return failed != nullptr && (is_one_of(failed->where.op, ops) || is_one_of(failed->where.inner, ops));
}

bool is_of_models(Category category) {
  return category == Category::parameter || category == Category::gradient || category == Category::optimizer_state;
}

std::set<int64_t> find_sizes_of_weights(const ReasonFacts& facts) {
  constexpr int64_t kTelling = 1 << 20;  // smaller ones are of usual sizes
  std::set<int64_t> sizes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (is_of_models(block.category) && block.requested_bytes >= kTelling) sizes.insert(block.requested_bytes);
  }
  return sizes;
}

Reason reference_cycle(const std::string& what, int64_t bytes) {
  return {
      .id = {},
      .text = fmt::format("no variable leads to {}: reference cycles, which wait for Python's garbage collector", what),
      .bytes = bytes,
      .fix = "collect_garbage",
      .how = {"gc.collect()  # after each step; or no cycle: weakref.ref(self) in callbacks and hooks"}};
}

bool lets_request_through(const ReasonFacts& facts, int64_t bytes) {
  const MemoryState& state = facts.device.state;
  return requested_bytes(facts) <= state.free_bytes + state.reserved_bytes - state.allocated_bytes + bytes;
}

bool is_copy(std::string_view op) { return is_one_of(op, {"aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda"}); }

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

}  // namespace oomdiag
