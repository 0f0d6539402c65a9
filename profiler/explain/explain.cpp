#include "profiler/explain/explain.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "profiler/explain/batch.h"
#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/facts.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/owners.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fix_rules.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/framework_lines.h"
#include "profiler/explain/fixes/predict_fixes.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/step/known_rest.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/step/whole_step.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

std::array<int64_t, kCategoryCount> sum_categories(const MemoryState& state) {
  std::array<int64_t, kCategoryCount> sums{};
  for (const LiveBlock& block : state.blocks) {
    if (!block.pending_free) sums[static_cast<size_t>(block.category)] += block.bytes;
  }
  return sums;
}

Cause find_cause(const FailureFacts& facts, const MemoryState& state) {
  const CauseRow& row = decide_cause(facts);
  Cause cause{.kind = row.kind, .because = row.because, .short_by_bytes = row.short_by(facts), .facts = facts};
  if (row.kind == CauseKind::non_pytorch) cause.holders = list_foreign_owners(state);
  if (facts.is_enough_if_packed()) cause.blocked_segments = find_blocked_segments(state, 5);
  return cause;
}

namespace {

/// The step that fixes are tried on, and what is known of it.
struct Described {
  StepAllocations step_allocations{};
  bool whole = true;
  uint32_t forward_end = 0;  ///< of a step that is not whole
  StepNeed need{};
};

// The step after this one needs more: it begins with what add_known_rest() puts last.
void have_state_from_the_beginning(Allocations& blocks) {
  blocks.back().born = StepAllocation::kBefore;
  std::rotate(blocks.begin(), std::prev(blocks.end()), blocks.end());
}

Described describe_step(const DeviceHistory& device) {
  if (!device.failure) return {.step_allocations = device.step_allocations};
  const int64_t now = device.state.allocated_bytes + device.failure->requested_bytes;
  if (is_like(device.step_allocations, device.complete)) {
    StepAllocations step = run_on(device.step_allocations, device.complete);
    const int64_t peak = find_peak(step.blocks);
    const bool holds_more = now - peak > now / 20;  // what the step before left, and did not have itself
    if (!holds_more) return {.step_allocations = std::move(step), .need = {.bytes = peak, .whole = true}};
  }
  if (device.step_allocations.step == 0) return {.whole = false};
  KnownRest rest = add_known_rest(device.step_allocations, device.state);
  const int64_t peak = find_peak(rest.step_allocations.blocks);
  const bool has_state_to_come = rest.state_bytes > 0 && device.failure->phase != Phase::optimizer;
  if (has_state_to_come) have_state_from_the_beginning(rest.step_allocations.blocks);
  return {.step_allocations = std::move(rest.step_allocations),
          .whole = false,
          .forward_end = rest.forward_end,
          .need = {.bytes = peak,
                   .more_comes = rest.modules_to_come > 0,
                   .next_bytes = has_state_to_come ? now + rest.state_bytes : 0}};
}

// "AdamW" of "AdamW, group 1": the one with most parameters.
std::string_view find_optimizer(const MemoryState& state) {
  std::map<std::string_view, int64_t> bytes;
  for (const LiveBlock& block : state.blocks) {
    if (block.category != Category::parameter || block.group.empty()) continue;
    bytes[block.group.substr(0, block.group.find_first_of(", "))] += block.bytes;
  }
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? std::string_view() : most->first;
}

// The calls that led to the request; in inference the lines of packages inside of those that made the tensors.
std::string_view name_framework(const DeviceHistory& device) {
  if (device.failure) {
    const std::string_view named = find_framework(device.failure->stack);
    if (!named.empty()) return named;
  }
  for (const LiveBlock& block : device.state.blocks) {
    const std::string_view named = find_framework(block.made.inner_source);
    if (!named.empty()) return named;
  }
  return {};
}

// Of a run that failed, or whose OOMs were caught, the batch did not fit, and tensors of a part of a step show it less well.
std::optional<BatchModel> describe_batch(const DeviceHistory& device, const StepModel& step) {
  const bool failed = device.failure || has_caught(device);
  const int64_t requested = device.failure ? device.failure->requested_bytes : 0;
  const std::optional<int64_t> batch = step.batch || failed ? step.batch : find_batch(device.state);
  if (!batch || *batch <= 0) return std::nullopt;
  const int64_t available = step.available_bytes - step.private_pool_cached_bytes;
  BatchModel model = model_batch(device.state, requested, *batch, available);
  model.inferred = !step.batch;
  if (step.leaks) {
    model.largest_batch = 0;  // none fits for good
  } else if (!failed && !step.blocks.empty()) {
    model.largest_batch = find_largest_batch(step, *batch);
  }
  return model;
}

std::string growing_place(const std::vector<Growth>& growths) {
  return growths.empty() ? std::string() : short_place(growths.front().held);
}

// Of a run that fits: a loss of 4 bytes that is appended in each step is no growth that anybody would look for.
void forget_distant_growths(int64_t headroom_bytes, std::vector<Growth>& growths) {
  if (headroom_bytes / kDistantSteps > sum_per_step(growths)) growths.clear();
}

// A run that fits and grows: where what is left is used up at its pace.
std::optional<uint32_t> find_step_of_failure(const DeviceHistory& device, const Findings& findings) {
  const int64_t per_step = sum_per_step(findings.growths);
  if (device.failure || per_step <= 0) return std::nullopt;
  const int64_t steps = findings.headroom_bytes / per_step;
  return findings.growths.front().last_step + static_cast<uint32_t>(steps);
}

/// Whether what the program holds is to be named first: hardly anything would be left without fragmentation, or the request is so large
/// that it would need most of what is free in one piece.
bool is_first(const Reason& reason, const Cause& cause) {
  constexpr int64_t kSmallPart = 50, kLargePart = 4;
  const FailureFacts& facts = cause.facts;
  const bool is_large_request =
      facts.requested_bytes * kLargePart >= facts.total_bytes && reason.bytes >= facts.requested_bytes;
  return is_large_request || facts.left_if_packed_bytes() * kSmallPart < facts.total_bytes;
}

/// Whether the pass that failed is no part of training, whatever the program has trained before.
bool fails_in_inference(const DeviceHistory& device) {
  if (!device.failure || device.failure->phase != Phase::forward) return false;
  const std::optional<bool> in_graph = builds_graph(device.step_allocations);
  if (device.failure->no_grad) return !in_graph.value_or(false);
  // Behind the model, which has run without a graph.
  return device.failure->where.module.empty() && !in_graph.value_or(true) && device.attribution.backward_bytes > 0;
}

/// Of the steps before and after the one that is described.
int64_t find_peak_of_others(const DeviceHistory& device) {
  int64_t most = 0;
  for (const PhasePeak& peak : device.phases) {
    if (peak.step != device.step_allocations.step) most = std::max(most, peak.allocated_bytes);
  }
  return most;
}

/// What fixes are predicted from.
StepModel make_step_model(const DeviceHistory& device, const ExplainInputs& inputs, const Findings& findings,
                          int64_t private_pools, Described step) {
  const MemoryState& state = device.state;
  const int64_t requested = device.failure ? device.failure->requested_bytes : 0;
  const int64_t peak_of_step = find_peak(step.step_allocations.blocks);
  return {
      .blocks = std::move(step.step_allocations.blocks),
      .whole = step.whole,
      .forward_end = step.forward_end,
      .peak_bytes = !device.failure       ? device.peak.allocated_bytes
                    : step.need.bytes > 0 ? peak_of_step
                                          : state.allocated_bytes + requested,
      .available_bytes =
          available_bytes(inputs.device.total_bytes, state.non_pytorch_bytes, inputs.settings.memory_fraction),
      .private_pool_cached_bytes = private_pools,
      .is_fragmented = findings.cause && findings.cause->kind == CauseKind::fragmentation,
      .batch = inputs.batch,
      .grown_bytes = sum_grown(findings.growths),
      .grown_per_step = sum_per_step(findings.growths),
      .last_step = findings.growths.empty() ? 0 : findings.growths.front().last_step,
      .growing_place = growing_place(findings.growths),
      .leaks = findings.cause ? findings.cause->kind == CauseKind::leak : findings.out_of_memory_near_step.has_value(),
      .other_peak_bytes = find_peak_of_others(device),
      .has_backward = device.attribution.backward_bytes > 0,
      .only_infers = fails_in_inference(device) ||
                     (device.attribution.backward_bytes == 0 && (step.whole || device.state.step > 1)),
      .settings = inputs.settings,
      .compute_major = inputs.device.compute_major,
      .optimizer = find_optimizer(state),
      .framework = name_framework(device),
      .sharded = device.sharded};
}

/// What else is behind the cause, with its cure: where the first one does not help, it is what a reader can change.
void add_besides(const std::optional<Reason>& reason, const StepModel& model, Findings& findings) {
  if (!reason) return;
  findings.besides = Advice{.reason = *reason, .fixes = findings.fixes};
  add_cure(*reason, model, findings.besides->fixes);
  if (reason != findings.reason) add_cure(*reason, model, findings.fixes);
}

/// Whether what backward needs of an earlier step is still there: the next step may find more of it.
bool holds_earlier_graph(const DeviceHistory& device) {
  constexpr int64_t kSmallPart = 20;
  int64_t bytes = 0;
  for (const LiveBlock& block : device.state.blocks) {
    const bool is_earlier = block.category == Category::activation && block.step > 0 && block.step < device.state.step;
    bytes += is_earlier && !block.pending_free ? block.bytes : 0;
  }
  return device.failure && bytes * kSmallPart > device.state.allocated_bytes;
}

/// Of what changes one step alone.
void doubt_fits(std::vector<Fix>& fixes) {
  for (Fix& fix : fixes) {
    const FixRow* const row = find_fix(fix.id);
    const bool is_cure = cures_reason(fix.id) || (row != nullptr && row->cures_growth);
    if (!is_cure && fix.predicted_fits == true) fix.predicted_fits.reset();
  }
  std::ranges::stable_sort(fixes, is_better);
}

/// Whether a graph was built in the step that failed or in the one before, or neither has run a module that would show it.
bool may_build_graph(const DeviceHistory& device) {
  bool is_shown = false;
  for (const StepAllocations* step : {&device.step_allocations, &device.complete}) {
    for (const StepAllocation& block : step->blocks) {
      if (block.in_graph) return true;
      is_shown = is_shown || !block.made.module.empty();
    }
  }
  return !is_shown || device.attribution.backward_bytes > 0;
}

}  // namespace

bool has_caught(const DeviceHistory& device) {
  return std::ranges::find(device.ooms, Outcome::caught, &OutOfMemory::outcome) != device.ooms.end();
}

int64_t private_pool_cached_bytes(const MemoryState& state, uint8_t asked) {
  int64_t bytes = 0;
  for (const SegmentLayout& segment : state.segments) {
    if (segment.pool != 0 && segment.pool != asked) bytes += segment.bytes - segment.used_bytes;
  }
  return bytes;
}

Findings explain(const DeviceHistory& device, const ExplainInputs& inputs) {
  const AllocatorSettings& settings = inputs.settings;
  const Device& gpu = inputs.device;
  const MemoryState& state = device.state;
  const int64_t requested = device.failure ? device.failure->requested_bytes : 0;
  const int64_t available = available_bytes(gpu.total_bytes, state.non_pytorch_bytes, settings.memory_fraction);
  const int64_t private_pools = private_pool_cached_bytes(state, device.failure ? device.failure->pool : uint8_t{0});
  Described step = describe_step(device);
  Findings findings;
  findings.growths = find_growth(device.curves, may_build_graph(device));
  find_referrers(device.referrers, findings.growths, device.looked_for_referrers);
  if (device.failure) {
    FailureFacts facts = collect_facts(device, settings, gpu, findings.growths, step.need);
    facts.total_is_known = inputs.total_is_known;
    facts.imbalance = inputs.imbalance;
    findings.cause = find_cause(facts, state);
  }
  findings.packing = measure_packing(state, gpu.total_bytes);
  findings.required_bytes = state.non_pytorch_bytes + findings.packing.pack_bytes;
  if (device.failure) findings.required_bytes += segment_size(requested, settings) + private_pools;
  findings.required_bytes = std::max(findings.required_bytes, state.non_pytorch_bytes + step.need.most());
  findings.owners = list_owners(state);
  findings.largest = follow_largest(state);
  findings.headroom_bytes =
      std::max<int64_t>(0, available - private_pools - state.allocated_bytes - state.pending_free_bytes);
  if (!device.failure) forget_distant_growths(findings.headroom_bytes, findings.growths);
  findings.out_of_memory_near_step = find_step_of_failure(device, findings);
  const StepModel model = make_step_model(device, inputs, findings, private_pools, std::move(step));
  findings.batch = describe_batch(device, model);
  ReasonFacts facts{.device = device,
                    .growths = findings.growths,
                    .cause = findings.cause ? std::optional(findings.cause->kind) : std::nullopt,
                    .batch = findings.batch ? findings.batch->batch : 0};
  findings.reason = find_reason(facts);
  // A key-value cache ends with what is being written.
  if (!device.failure && findings.reason && findings.reason->id == "key_value_cache")
    findings.out_of_memory_near_step.reset();
  findings.fixes = predict_fixes(model);
  if (model.is_fragmented) {
    facts.cause = CauseKind::capacity;
    auto reason = find_reason(facts);
    const bool is_known = reason && reason == findings.reason;
    if (const auto second = is_known ? find_second_reason(facts, *reason) : std::nullopt) reason = second;
    const bool gives_way = findings.reason && findings.reason->is_of_pieces();
    if (reason && gives_way && is_first(*reason, *findings.cause)) std::swap(*reason, *findings.reason);
    add_besides(reason, model, findings);
  } else if (findings.reason) {
    add_besides(find_second_reason(facts, *findings.reason), model, findings);
  }
  if (findings.reason) add_cure(*findings.reason, model, findings.fixes);
  if (holds_earlier_graph(device)) {
    doubt_fits(findings.fixes);
    if (findings.besides) doubt_fits(findings.besides->fixes);
  }
  return findings;
}

}  // namespace oomdiag
