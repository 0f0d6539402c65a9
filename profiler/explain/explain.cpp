#include "profiler/explain/explain.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "profiler/explain/batch.h"
#include "profiler/explain/known_rest.h"
#include "profiler/explain/remedies.h"
#include "profiler/explain/what_if.h"
#include "profiler/explain/whole_step.h"
#include "profiler/replay/categories.h"
#include "profiler/replay/rounding.h"

// Why was it refused? When the allocator gives up it has already returned every cached segment that was wholly free, so
// what is still cached lies in holes beside live blocks. The questions are asked in this order; the first yes is the cause:
//
//   oversized_request  the card could not give it even if PyTorch held nothing else
//   leak               it would fit without what grew from step to step
//   fraction_cap       a limit that the program set itself stood in the way, the card had room
//   outside_pytorch    it would fit if others held no more of the card than a context takes
//   workspace          it was no tensor: a library's scratch space, which a slower algorithm does without
//   fragmentation      free and cached bytes together are enough, but no hole is; and the rest of the step would run as
//                      well if all were packed. In forward that must be known: from a whole step like this one, or because
//                      every module of the model was called and as much is left as was asked for; and where the
//                      optimizer's state was not made yet, it must be left as well, for the next step holds it here
//   pending_frees      … are enough with blocks that are freed but still in use on another stream
//   capacity           even then bytes are missing: `short_by_bytes` of them
//
// Imbalance between the cards of one program is found afterwards, from all of them: imbalance.h.
//
// A cached segment that is wholly free even so is of a pool that the allocator may not touch, as while a CUDA graph is
// captured. It helps nobody and does not count as cached; nor does what other pools than the one that was asked keep.
//
// "Enough" means what the allocator asks of the driver: whole segments, 20 MiB for anything from 1 to 10 MiB.

namespace oomdiag {
namespace {

/// The figures that the questions are about.
struct Facts {
  int64_t requested = 0, segment = 0, free = 0, cached = 0, pending = 0, outside = 0, reserved = 0, total = 0;
  int64_t allowed = 0;         ///< the limit that the program set, or total
  bool capped = false;         ///< a limit was set, though where it lies is not known: not above `allowed`
  int64_t grown = 0;           ///< from step to step
  int64_t lacking_later = 0;   ///< what the rest of the step, or the next one, lacks even if all is packed
  int64_t in_other_pools = 0;  ///< cached, but in pools that do not serve this request
};

// A context and the libraries' own memory on a real card, where nothing says how much that is.
constexpr int64_t kUsualContextBytes = kGiB;

// Another process may have freed what was missing a moment before.
bool shares_card(const Moment& moment) {
  return std::any_of(moment.outside.begin(), moment.outside.end(),
                     [](const OutsideOwner& owner) { return owner.kind == "process"; });
}

Facts read_figures(const OutOfMemory& failure, const Moment& moment, const AllocatorSettings& settings,
                   int64_t total_bytes) {
  Facts f{.requested = failure.requested_bytes,
          .segment = segment_size(failure.requested_bytes, settings),
          .free = moment.free_bytes,
          .cached = moment.reserved_bytes - moment.allocated_bytes - moment.pending_free_bytes,
          .pending = moment.pending_free_bytes,
          .outside = moment.outside_bytes,
          .reserved = moment.reserved_bytes,
          .total = total_bytes};
  for (const SegmentLayout& segment : moment.segments) {
    if (segment.used_bytes == 0 || segment.pool != failure.pool) f.cached -= segment.bytes - segment.used_bytes;
    if (segment.pool != failure.pool) f.in_other_pools += segment.bytes - segment.used_bytes;
  }
  f.cached = std::max<int64_t>(0, f.cached);
  f.allowed = f.total;
  if (settings.memory_fraction < 1) {
    f.allowed = std::llround(settings.memory_fraction * static_cast<double>(f.total));
  } else if (f.free >= f.segment && !shares_card(moment)) {
    // The card had room, and still it was refused: a limit was set at run time (set_per_process_memory_fraction). Where it
    // lies is not told; it was not above this.
    f.capped = true;
    f.allowed = f.reserved + f.segment - 1;
  }
  return f;
}

// cuBLAS asks for what PyTorch was configured to give it; what else a matrix product allocates after its first block is a
// tensor: under autocast the casts of its arguments come before its result.
bool wants_workspace(const OutOfMemory& failure, const Device& card) {
  if (!takes_workspace(failure.where.inner) || failure.first_in_op || !failure.wanted_shape.empty()) return false;
  if (!is_gemm(failure.where.inner)) return true;
  return is_cublas_workspace(failure.requested_bytes, card.cublas_workspace_bytes);
}

// A buffer that grows is made anew while the old one lives: the request itself has grown, too, as much as one of them.
int64_t grown_in_request(const OutOfMemory& failure, const std::vector<Growth>& growths) {
  for (const Growth& growth : growths) {
    const bool itself = growth.held.op == failure.where.op && growth.held.source == failure.where.source;
    if (growth.kind != GrowthKind::growing_buffer || !itself) continue;
    return std::min(failure.requested_bytes, growth.grown_bytes / static_cast<int64_t>(growth.place_count));
  }
  return 0;
}

// Where bytes are missing, the growth must be worth them. Where only a hole is missing, growth that is a small part of what
// lives is not what to mend first.
bool is_leak(const Facts& f) {
  const int64_t missing = std::max(f.segment - f.free - f.cached, f.reserved - f.cached + f.segment - f.allowed);
  if (missing > 0) return f.grown >= missing;
  return f.grown >= f.segment && f.grown >= (f.reserved - f.cached) / 20;
}

bool is_own(const OutsideOwner& owner) { return owner.owner == "context" || owner.owner == "modules"; }

// What any process takes of the card before PyTorch does. Part of it may be unexplained.
int64_t usual_outside_of(const Moment& moment, int64_t context_bytes) {
  int64_t own = 0;
  int64_t unexplained = 0;
  for (const OutsideOwner& owner : moment.outside) {
    if (is_own(owner)) own += owner.bytes;
    if (owner.owner == "unexplained") unexplained = owner.bytes;
  }
  if (own == 0) return context_bytes > 0 ? context_bytes : kUsualContextBytes;
  return own + std::clamp<int64_t>(unexplained, 0, std::max<int64_t>(0, kUsualContextBytes - own));
}

std::vector<OutsideOwner> find_holders(const Moment& moment) {
  std::vector<OutsideOwner> holders = moment.outside;
  std::erase_if(holders, [](const OutsideOwner& owner) { return is_own(owner) || owner.bytes <= 0; });
  std::stable_sort(holders.begin(), holders.end(),
                   [](const OutsideOwner& a, const OutsideOwner& b) { return a.bytes > b.bytes; });
  return holders;
}

// In forward what is saved stays, and more of it comes.
bool may_go_on(const Facts& f, const OutOfMemory& failure, const Moment& moment, const StepNeed& need) {
  if (f.lacking_later > 0) return false;
  if (need.whole || failure.phase != Phase::forward) return true;
  const bool saves = std::any_of(moment.blocks.begin(), moment.blocks.end(),
                                 [](const LiveBlock& block) { return block.category == Category::activation; });
  return !saves || (!need.more_comes && f.free + f.cached - f.segment >= f.requested);
}

CauseKind decide(const Facts& f, const OutOfMemory& failure, const Moment& moment, int64_t usual_outside,
                 const Device& card, const StepNeed& need) {
  const int64_t foreign = std::max<int64_t>(0, f.outside - usual_outside);
  if (f.requested > f.total - std::min(f.outside, usual_outside)) return CauseKind::oversized_request;
  if (is_leak(f)) return CauseKind::leak;
  if (f.allowed < f.total && f.reserved + f.segment > f.allowed && f.free >= f.segment) return CauseKind::fraction_cap;
  if (f.free + f.cached >= f.segment) {
    return may_go_on(f, failure, moment, need) ? CauseKind::fragmentation : CauseKind::capacity;
  }
  if (f.free + f.cached + f.pending >= f.segment) return CauseKind::pending_frees;
  if (f.free + f.cached + foreign >= f.segment) return CauseKind::outside_pytorch;
  const bool lacks_more = f.lacking_later > f.requested;  // than the workspace itself
  if (wants_workspace(failure, card) && !lacks_more) return CauseKind::workspace;
  return CauseKind::capacity;
}

int64_t short_by(const Facts& f, CauseKind kind) {
  if (kind == CauseKind::fraction_cap) {
    return f.capped ? 0 : std::max<int64_t>(0, f.reserved - f.cached + f.segment - f.allowed);
  }
  return std::max<int64_t>(kind == CauseKind::capacity ? f.lacking_later : 0, f.segment - f.free - f.cached);
}

int64_t largest_hole(const Moment& moment, uint8_t pool) {
  int64_t largest = 0;
  for (const SegmentLayout& segment : moment.segments) {
    if (segment.pool == pool) largest = std::max(largest, segment.largest_hole_bytes);
  }
  return largest;
}

}  // namespace

std::array<int64_t, kCategoryCount> sum_categories(const Moment& moment) {
  std::array<int64_t, kCategoryCount> sums{};
  for (const LiveBlock& block : moment.blocks) {
    if (!block.pending_free) sums[static_cast<size_t>(block.category)] += block.bytes;
  }
  return sums;
}

Cause find_cause(const OutOfMemory& failure, const Moment& moment, const AllocatorSettings& settings,
                 const Device& card, const std::vector<Growth>& growths, const StepNeed& need) {
  Facts f = read_figures(failure, moment, settings, card.total_bytes);
  f.grown = sum_grown(growths) + grown_in_request(failure, growths);
  f.lacking_later = std::max<int64_t>(0, need.most() - (f.total - f.outside));
  Cause cause{.kind = decide(f, failure, moment, usual_outside_of(moment, card.context_bytes), card, need)};
  cause.short_by_bytes = short_by(f, cause.kind);
  cause.evidence = {{"requested_bytes", f.requested},
                    {"segment_bytes", f.segment},
                    {"free_bytes", f.free},
                    {"cached_bytes", moment.reserved_bytes - moment.allocated_bytes - moment.pending_free_bytes},
                    {"pending_free_bytes", f.pending},
                    {"outside_pytorch_bytes", f.outside},
                    {"left_if_packed_bytes", std::max<int64_t>(0, f.free + f.cached - f.segment)},
                    {f.capped ? "allowed_at_most_bytes" : "allowed_bytes", f.allowed},
                    {"largest_hole_bytes", largest_hole(moment, failure.pool)}};
  if (need.bytes > 0) cause.evidence.emplace_back(need.whole ? "step_bytes" : "step_at_least_bytes", need.bytes);
  if (need.next_bytes > 0) cause.evidence.emplace_back("next_step_at_least_bytes", need.next_bytes);
  if (f.in_other_pools > 0) cause.evidence.push_back({"cached_in_other_pools_bytes", f.in_other_pools});
  if (cause.kind == CauseKind::leak) {
    cause.evidence.push_back({"grown_bytes", f.grown});
    cause.evidence.push_back({"bytes_per_step", sum_per_step(growths)});
  }
  if (cause.kind == CauseKind::outside_pytorch) cause.holders = find_holders(moment);
  if (cause.kind == CauseKind::fragmentation) cause.pinned = find_pinned_holes(moment, 5);
  return cause;
}

namespace {

/// The step that remedies are tried on, and what is known of it.
struct Described {
  StepLives lives{};
  bool whole = true;
  uint32_t forward_end = 0;  ///< of a step that is not whole
  StepNeed need{};
};

Described describe_step(const DeviceHistory& device) {
  if (!device.failure) return {.lives = device.lives};
  if (is_like(device.lives, device.complete)) {
    StepLives step = run_on(device.lives, device.complete);
    const int64_t peak = find_peak(step.blocks);
    return {.lives = std::move(step), .need = {.bytes = peak, .whole = true}};
  }
  if (device.lives.step == 0) return {.whole = false};
  KnownRest rest = add_known_rest(device.lives, device.moment);
  const int64_t peak = find_peak(rest.lives.blocks);
  const int64_t now = device.moment.allocated_bytes + device.failure->requested_bytes;
  const bool has_state_to_come = rest.state_bytes > 0 && device.failure->phase != Phase::optimizer;
  return {.lives = std::move(rest.lives),
          .whole = false,
          .forward_end = rest.forward_end,
          .need = {.bytes = peak,
                   .more_comes = rest.modules_to_come > 0,
                   .next_bytes = has_state_to_come ? now + rest.state_bytes : 0}};
}

// Libraries ask the driver for what their handles, code and communicators take. The allocator does not know of it and gives
// nothing up for it: cached bytes that are enough do not help.
std::optional<Cause> find_cause_of_library(const DeviceHistory& device) {
  const int64_t wanted = device.failure->requested_bytes;
  const auto asker = std::ranges::find(device.driver_refusals, wanted, &OutsideOwner::bytes);
  if (asker == device.driver_refusals.end()) return std::nullopt;
  const Moment& moment = device.moment;
  int64_t releasable = 0;  // what empty_cache() gives back: segments without a block in use
  for (const SegmentLayout& segment : moment.segments) releasable += segment.used_bytes == 0 ? segment.bytes : 0;
  return Cause{
      .kind = CauseKind::workspace,
      .short_by_bytes = std::max<int64_t>(0, wanted - moment.free_bytes),
      .evidence = {{"requested_bytes", wanted},
                   {"free_bytes", moment.free_bytes},
                   {"cached_bytes", moment.reserved_bytes - moment.allocated_bytes - moment.pending_free_bytes},
                   {"releasable_bytes", releasable}},
      .holders = {*asker}};
}

// "AdamW" of "AdamW, group 1": the one with most parameters.
std::string_view find_optimizer(const Moment& moment) {
  std::map<std::string_view, int64_t> bytes;
  for (const LiveBlock& block : moment.blocks) {
    if (block.category != Category::parameter || block.group.empty()) continue;
    bytes[block.group.substr(0, block.group.find_first_of(", "))] += block.bytes;
  }
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? std::string_view() : most->first;
}

// A run that failed keeps tensors of a part of its step only: their first sizes say less.
std::optional<BatchModel> describe_batch(const DeviceHistory& device, const std::optional<int64_t>& known,
                                         int64_t available_bytes) {
  const int64_t requested = device.failure ? device.failure->requested_bytes : 0;
  if (known)
    return *known > 0 ? std::optional(model_batch(device.moment, requested, *known, available_bytes)) : std::nullopt;
  const auto inferred = device.failure ? std::nullopt : find_batch(device.moment);
  if (!inferred) return std::nullopt;
  BatchModel model = model_batch(device.moment, 0, *inferred, available_bytes);
  model.inferred = true;
  return model;
}

}  // namespace

int64_t private_pool_cached_bytes(const Moment& moment, uint8_t asked) {
  int64_t bytes = 0;
  for (const SegmentLayout& segment : moment.segments) {
    if (segment.pool != 0 && segment.pool != asked) bytes += segment.bytes - segment.used_bytes;
  }
  return bytes;
}

Findings explain(const DeviceHistory& device, const ExplainInputs& inputs) {
  const AllocatorSettings& settings = inputs.settings;
  const Device& card = inputs.device;
  const Moment& moment = device.moment;
  const int64_t refused = device.failure ? device.failure->requested_bytes : 0;
  const int64_t room = card.total_bytes - moment.outside_bytes;
  const int64_t private_pools = private_pool_cached_bytes(moment, device.failure ? device.failure->pool : uint8_t{0});
  const Described step = describe_step(device);
  Findings findings;
  findings.growths = find_growth(device.curves);
  if (device.failure) {
    const auto of_library = find_cause_of_library(device);
    findings.cause =
        of_library ? *of_library : find_cause(*device.failure, moment, settings, card, findings.growths, step.need);
  }
  findings.packing = measure_packing(moment, card.total_bytes);
  findings.needs_bytes = moment.outside_bytes + findings.packing.pack_bytes;
  if (device.failure) findings.needs_bytes += segment_size(refused, settings) + private_pools;
  findings.needs_bytes = std::max(findings.needs_bytes, moment.outside_bytes + step.need.most());
  findings.owners = list_owners(moment);
  findings.largest = follow_largest(moment);
  findings.headroom_bytes =
      std::max<int64_t>(0, room - private_pools - moment.allocated_bytes - moment.pending_free_bytes);
  findings.batch = describe_batch(device, inputs.batch, room - private_pools);
  const Situation situation{.lives = step.lives,
                            .peak_bytes = !device.failure       ? device.peak.allocated_bytes
                                          : step.need.bytes > 0 ? step.need.bytes
                                                                : moment.allocated_bytes + refused,
                            .room_bytes = room,
                            .private_pool_cached_bytes = private_pools,
                            .batch = inputs.batch,
                            .grown_bytes = sum_grown(findings.growths),
                            .has_backward = device.attribution.backward_bytes > 0,
                            .whole = step.whole,
                            .forward_end = step.forward_end,
                            .settings = settings,
                            .compute_major = card.compute_major,
                            .optimizer = find_optimizer(moment),
                            .sharded = device.sharded};
  findings.remedies = predict_remedies(situation);
  if (findings.cause && findings.cause->kind == CauseKind::fragmentation && !settings.expandable_segments) {
    findings.remedies.insert(findings.remedies.begin(), predict_expandable_segments(situation));
  }
  return findings;
}

}  // namespace oomdiag
