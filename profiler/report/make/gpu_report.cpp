#include "profiler/report/make/gpu_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>

#include "profiler/explain/explain.h"
#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/owners.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/fold_indices.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/history.h"
#include "profiler/report/make/holders.h"
#include "profiler/report/make/saved.h"
#include "profiler/report/report.h"
#include "profiler/report/words/place_text.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxSavedTensors = 200;
constexpr size_t kMaxOwners = 50;
constexpr size_t kMaxCaught = 50;
constexpr size_t kMaxPinnedPlaces = 8;

ReportPeak report_peak(const DeviceHistory& device) {
  ReportPeak peak{.allocated_bytes = std::max(device.peak.allocated_bytes, device.counted_peak_bytes),
                  .reserved_bytes = device.peak.reserved_bytes,
                  .phase = device.peak.phase,
                  .step = device.peak.step,
                  .cached_for_streams_bytes = device.cached_for_streams.bytes,
                  .streams = device.cached_for_streams.streams};
  if (device.failure) return peak;  // the described moment is another one
  const Where& where = device.state.where;
  peak.node = where.node;
  peak.op = where.op;
  peak.module = where.module;
  peak.source = where.source;
  peak.inner_source = where.inner_source;
  peak.autocast = where.autocast;
  return peak;
}

std::string describe_requested_gradient(const OutOfMemory& oom) {
  if (oom.requested_shape.empty()) return {};
  const Where& by = oom.requested_gradient_of;
  const std::string_view whose = !by.module.empty() ? by.module : by.op;
  const std::string what = whose.empty() ? "gradient" : fmt::format("gradient of {}", whose);
  return fmt::format("{}, {}", what, oom.requested_shape);
}

/// From the innermost C++ call that is neither PyTorch's nor the system's.
std::string_view calls_of_program(std::string_view calls) {
  while (!calls.empty() && is_in_library(calls)) calls.remove_prefix(std::min(calls.find('\n'), calls.size() - 1) + 1);
  return calls;
}

ReportFailure report_failure(const Trace& trace, const OutOfMemory& oom) {
  return {.phase = oom.phase,
          .step = oom.step,
          .node = std::string(oom.where.node),
          .op = std::string(oom.where.op),
          .module = std::string(oom.where.module),
          .source = std::string(oom.where.source),
          .inner_source = std::string(oom.where.inner_source),
          .inner_op = std::string(oom.where.inner),
          .requested_bytes = oom.requested_bytes,
          .allocated_bytes = oom.allocated_bytes,
          .reserved_bytes = oom.reserved_bytes,
          .free_bytes = oom.free_bytes,
          .time_ns = oom.event < trace.events.size() ? trace.time_ns(trace.events[oom.event]) : 0,
          .requested_for = describe_requested_gradient(oom),
          .stack = split_lines(oom.stack.empty() ? calls_of_program(oom.native_stack) : oom.stack),
          .native_stack = split_lines(oom.native_stack),
          .autocast = std::string(oom.where.autocast),
          .parameter_group = std::string(oom.group)};
}

ReportOwner report_owner(const LiveBlock& block) {
  ReportOwner owner{.category = block.category,
                    .bytes = block.bytes,
                    .name = std::string(label_of(block)),
                    .shape = std::string(block.shape),
                    .used_by = {},
                    .autocast = std::string(block.made.autocast),
                    .parameter_group = std::string(block.group)};
  for (const Where& saver : block.saved_by) {
    const std::string label(label_of(saver));
    const bool listed = std::find(owner.used_by.begin(), owner.used_by.end(), label) != owner.used_by.end();
    if (!listed && label != owner.name) owner.used_by.push_back(label);
  }
  return owner;
}

// A snapshot knows blocks by the line that made them: what one line holds is one owner.
std::vector<ReportOwner> owners_by_line(const MemoryState& state) {
  std::map<std::pair<Category, std::string_view>, int64_t> sums;
  for (const LiveBlock& block : state.blocks) {
    const Where& made = block.made;
    const std::string_view own = made.inner_source.empty() ? made.source : made.inner_source;
    const std::string_view line = own.empty() ? label_of(made) : own;
    if (!block.pending_free) sums[{block.category, line}] += block.bytes;
  }
  std::vector<ReportOwner> owners;
  for (const auto& [who, bytes] : sums) {
    owners.push_back({.category = who.first, .bytes = bytes, .name = std::string(who.second)});
  }
  std::stable_sort(owners.begin(), owners.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  if (owners.size() <= kMaxOwners) return owners;
  ReportOwner others{.category = Category::unknown, .name = "others"};
  for (size_t i = kMaxOwners - 1; i < owners.size(); ++i) others.bytes += owners[i].bytes;
  owners.resize(kMaxOwners - 1);
  owners.push_back(std::move(others));
  return owners;
}

ReportCause report_cause(const Cause& cause) {
  ReportCause report{.kind = cause.kind,
                     .because = std::string(cause.because),
                     .short_by_bytes = cause.short_by_bytes,
                     .evidence = cause.facts,
                     .blocked_segments = {},
                     .non_pytorch = cause.holders};
  for (const BlockedSegment& segment : cause.blocked_segments) {
    auto& blocked = report.blocked_segments.emplace_back();
    blocked.bytes = segment.bytes;
    blocked.largest_free_block_bytes = segment.largest_free_block_bytes;
    blocked.used_bytes = segment.used_bytes;
    for (const LiveBlock& block : segment.blocked_by) blocked.blocked_by.push_back(report_owner(block));
  }
  return report;
}

Figures report_categories(const MemoryState& state) {
  const auto sums = sum_categories(state);
  Figures figures;
  for (size_t c = 0; c < kCategoryCount; ++c) {
    figures.emplace_back(name_of(static_cast<Category>(c)), sums[c]);
  }
  return figures;
}

// Of a recording there are none.
std::vector<ReportFromStacks> report_from_stacks(const MemoryState& state) {
  std::map<std::pair<Category, Confidence>, int64_t> sums;
  for (const LiveBlock& block : state.blocks) {
    if (!block.pending_free && block.confidence != Confidence::none)
      sums[{block.category, block.confidence}] += block.bytes;
  }
  std::vector<ReportFromStacks> report;
  for (const auto& [what, bytes] : sums) {
    report.push_back({.category = what.first, .confidence = std::string(name_of(what.second)), .bytes = bytes});
  }
  return report;
}

Figures report_private_pools(const MemoryState& state) {
  int64_t reserved = 0;
  int64_t used = 0;
  for (const SegmentLayout& segment : state.segments) {
    if (segment.pool == 0) continue;
    reserved += segment.bytes;
    used += segment.used_bytes;
  }
  if (reserved == 0) return {};
  return {{"reserved_bytes", reserved}, {"cached_bytes", reserved - used}};
}

ReportMemory report_memory(const MemoryState& state) {
  return {.allocated_bytes = state.allocated_bytes,
          .pending_free_bytes = state.pending_free_bytes,
          .cached_bytes = state.reserved_bytes - state.allocated_bytes - state.pending_free_bytes,
          .non_pytorch_bytes = state.non_pytorch_bytes,
          .free_bytes = state.free_bytes};
}

std::vector<const LiveBlock*> by_size(const MemoryState& state, size_t at_most, bool saved_only) {
  std::vector<const LiveBlock*> blocks;
  for (const LiveBlock& block : state.blocks) {
    const bool saved = block.category == Category::activation && !block.saved_by.empty();
    if (!block.pending_free && (saved || !saved_only)) blocks.push_back(&block);
  }
  const auto larger = [](const LiveBlock* a, const LiveBlock* b) {
    return a->bytes != b->bytes ? a->bytes > b->bytes : a->address < b->address;
  };
  const size_t kept = std::min(at_most, blocks.size());
  std::partial_sort(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(kept), blocks.end(), larger);
  blocks.resize(kept);
  return blocks;
}

// One row per group, the largest first, and one for what is in none. Together they are what the three categories hold.
std::vector<ReportParameterGroup> report_groups(const MemoryState& state) {
  std::map<std::string_view, ReportParameterGroup> groups;
  for (const LiveBlock& block : state.blocks) {
    const bool parameter = block.category == Category::parameter;
    const bool gradient = block.category == Category::gradient;
    const bool optimizer_state = block.category == Category::optimizer_state;
    if (block.pending_free || !(parameter || gradient || optimizer_state)) continue;
    ReportParameterGroup& group = groups[block.group];
    group.name = block.group;
    (parameter ? group.parameter_bytes : gradient ? group.gradient_bytes : group.optimizer_state_bytes) += block.bytes;
  }
  std::vector<ReportParameterGroup> report;
  for (const auto& [name, group] : groups) {
    if (!name.empty()) report.push_back(group);
  }
  if (report.size() < 2) return {};
  std::ranges::stable_sort(report, std::greater{}, [](const ReportParameterGroup& group) {
    return group.parameter_bytes + group.gradient_bytes + group.optimizer_state_bytes;
  });
  if (const auto rest = groups.find(""); rest != groups.end()) report.push_back(rest->second);
  return report;
}

// What the others would save hangs on what blocks hold, which no snapshot shows.
bool needs_no_categories(const Fix& fix) {
  const FixRow* const row = find_fix(fix.id);
  return row != nullptr && row->needs_no_categories;
}

ReportGrowth report_growth(const Growth& growth) {
  ReportGrowth report{.kind = growth.kind,
                      .bytes_per_step = growth.bytes_per_step,
                      .grown_bytes = growth.grown_bytes,
                      .first_step = growth.first_step,
                      .last_step = growth.last_step,
                      .op = std::string(growth.held.op),
                      .module = std::string(growth.held.module),
                      .source = std::string(growth.held.source),
                      .referrer = as_written(growth.referrer),
                      .place_count = static_cast<int64_t>(growth.place_count)};
  const bool in_layers = std::ranges::any_of(
      growth.places, [&](const GrowingPlace& place) { return place.where.module != growth.held.module; });
  if (in_layers && growth.kind != GrowthKind::retained_graph) report.module = fold_indices(report.module);
  for (const GrowingPlace& place : growth.places) {
    report.places.push_back({std::string(place.where.op), std::string(place.where.module),
                             std::string(place.where.source), place.bytes_per_step, place.live_bytes, place.blocks});
  }
  return report;
}

ReportLifetime report_lifetime(const Lifetime& life) {
  const ReportOwner owner = report_owner(life.block);
  const Where freed_by = life.freed_by.value_or(Where{});
  return {.category = owner.category,
          .name = owner.name,
          .shape = owner.shape,
          .bytes = owner.bytes,
          .made_in = life.block.phase,
          .made_in_step = life.block.step,
          .op = std::string(life.block.made.op),
          .module = std::string(life.block.made.module),
          .source = std::string(life.block.made.source),
          .kept_by = life.kept_by,
          .freed_by_node = std::string(freed_by.node),
          .freed_by_module = std::string(freed_by.module)};
}

void report_ooms(const Trace& trace, const DeviceHistory& device, ReportOfDevice& report) {
  using Kind = std::tuple<std::string_view, std::string_view, int64_t, int64_t>;  // op, node, asked, granted
  report.caught_at_least = trace.overwritten_events > 0;
  std::map<Kind, int64_t> recovered;
  for (const OutOfMemory& oom : device.ooms) {
    switch (oom.outcome) {
      case Outcome::recovered:
        ++recovered[{oom.where.op, oom.where.node, oom.requested_bytes, oom.granted_bytes}];
        break;
      case Outcome::caught:
        ++report.caught_count;
        if (report.caught.size() < kMaxCaught) report.caught.push_back(report_failure(trace, oom));
        break;
      case Outcome::fatal:
        break;
    }
  }
  for (const auto& [kind, count] : recovered) {
    const auto& [op, node, asked, granted] = kind;
    report.recovered_by_library.push_back({std::string(op), asked, count, granted, std::string(node)});
  }
}

}  // namespace

Device find_gpu(const Trace& trace, int index) {
  const auto at = static_cast<size_t>(index);
  return at < trace.devices.size() ? trace.devices[at] : Device{};
}

namespace {

/// What was held at the described moment, and by whom.
void report_moment(const Trace& trace, const DeviceHistory& device, ReportOfDevice& report) {
  const MemoryState& state = device.state;
  report.categories = report_categories(state);
  report.from_stacks = report_from_stacks(state);
  report.memory = report_memory(state);
  report.private_pools = report_private_pools(state);
  report.non_pytorch = state.non_pytorch;
  report.host_memory = state.host_memory;
  const auto pinned_host_memory =
      std::span(state.pinned_host_memory).first(std::min(state.pinned_host_memory.size(), kMaxPinnedPlaces));
  report.pinned_host_memory.assign(pinned_host_memory.begin(), pinned_host_memory.end());
  report.failed_driver_requests = device.failed_driver_requests;
  report.initialization_steps = device.initialization_steps;
  if (trace.process.snapshot) {
    report.allocations = owners_by_line(state);
  } else {
    for (const LiveBlock* block : by_size(state, kMaxOwners, false)) report.allocations.push_back(report_owner(*block));
  }
  report.top_allocations = fold_holders(state, CommonReferrers(device.referrers));
  for (const LiveBlock* block : by_size(state, kMaxSavedTensors, true)) {
    report.saved_tensors.push_back(report_saved(*block));
  }
  if (AutocastUse autocast = find_autocast(state); !autocast.dtype.empty()) report.autocast = std::move(autocast);
  report.parameter_groups = report_groups(state);
}

/// What PyTorch reserved beyond the room that known holders leave of the GPU. These are known of the described moment, and so is what was
/// reserved then; of other moments what is larger than the GPU by itself. Other processes may have gone since they were listed. With managed
/// memory in use nobody knows whose pages moved.
int64_t count_host_memory(const Device& gpu, const DeviceHistory& device) {
  const auto is_managed = [](const NonPytorchOwner& one) { return one.kind == "managed"; };
  if (gpu.total_bytes == 0 || std::ranges::any_of(device.state.host_memory, is_managed)) return 0;
  int64_t held = device.state.reserved_bytes;
  for (const NonPytorchOwner& one : device.state.non_pytorch)
    held += one.kind.empty() || one.kind == "process" ? 0 : one.bytes;
  return std::max<int64_t>(0, std::max(held, device.peak.reserved_bytes) - gpu.total_bytes);
}

}  // namespace

ReportOfDevice report_device(const Trace& trace, const DeviceHistory& device, const Findings& findings) {
  const Device gpu = find_gpu(trace, device.index);
  const MemoryState& state = device.state;
  ReportOfDevice report;
  report.device = {device.index, gpu.name, trace.process.virtual_device,
                   std::max(gpu.total_bytes, state.reserved_bytes),
                   fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)};
  report.peak = report_peak(device);
  report.peak.host_memory_bytes = count_host_memory(gpu, device);
  if (device.failure) {
    report.failure = report_failure(trace, *device.failure);
    report.failure->allocated_bytes = state.allocated_bytes;
    report.failure->reserved_bytes = state.reserved_bytes;
  }
  if (findings.cause) report.cause = report_cause(*findings.cause);
  report_moment(trace, device, report);
  const Packing& packing = findings.packing;
  report.packing = {{"load_bytes", packing.load_bytes},
                    {"pack_bytes", packing.pack_bytes},
                    {"reserved_bytes", packing.reserved_bytes},
                    {"total_bytes", packing.total_bytes}};
  const Attribution& joined = device.attribution;
  report.attribution = {{"backward_bytes", joined.backward_bytes},
                        {"with_node_bytes", joined.with_node_bytes},
                        {"with_forward_op_bytes", joined.with_forward_op_bytes},
                        {"with_module_bytes", joined.with_module_bytes},
                        {"with_source_bytes", joined.with_source_bytes},
                        {"accumulate_bytes", joined.accumulate_bytes}};
  report.headroom_bytes = findings.headroom_bytes;
  report.required_bytes = findings.required_bytes;
  report.replay_error_bytes = device.replay_error_bytes;
  for (const Growth& growth : findings.growths) report.growth.push_back(report_growth(growth));
  report.out_of_memory_near_step = findings.out_of_memory_near_step;
  report.allocated_by = findings.owners;
  if (findings.largest) report.largest_allocation = report_lifetime(*findings.largest);
  for (size_t p = 0; p < kPhaseCount; ++p) {
    report.phase_peaks.emplace_back(name_of(static_cast<Phase>(p)), device.phase_peaks[p]);
  }
  report.batch = findings.batch;
  if (!trace.process.snapshot) {
    report.reason = findings.reason;
    report.besides = findings.besides;
  }
  for (const Fix& fix : findings.fixes) {
    if (!trace.process.snapshot || needs_no_categories(fix)) report.fixes.push_back(fix);
  }
  report.phases = device.phases;
  for (const TimelinePoint& point : device.timeline) {
    report.timeline.push_back({point.time_ns, point.allocated_bytes, point.reserved_bytes});
  }
  report.marks = device.marks;
  report_ooms(trace, device, report);
  return report;
}

}  // namespace oomdiag
