#pragma once

#include <concepts>

#include "profiler/report/report.h"

// The JSON names of everything in a report, once for both directions. A visitor is called as `visit(name, member)`, and as
// `visit.or_null(name, text)` for texts that are null in JSON when they are empty. `value` may be const (when writing).
namespace oomdiag {

/// How many names an enum has: its values are 0, 1, 2, …, and name_of tells each.
template <class Enum>
inline constexpr size_t kCountOf = 0;
template <>
inline constexpr size_t kCountOf<Phase> = kPhaseCount;
template <>
inline constexpr size_t kCountOf<Category> = kCategoryCount;
template <>
inline constexpr size_t kCountOf<CauseKind> = kCauseKindCount;
template <>
inline constexpr size_t kCountOf<GrowthKind> = kGrowthKindCount;
template <>
inline constexpr size_t kCountOf<Keeper> = kKeeperCount;

template <class Value, class Plain>
concept Either = std::same_as<std::remove_const_t<Value>, Plain>;

template <class Visitor, Either<ReportDevice> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("index", value.index);
  visit("name", value.name);
  visit("virtual", value.virtual_device);
  visit("total_bytes", value.total_bytes);
  visit("compute_capability", value.compute_capability);
}

template <class Visitor, Either<ReportPeak> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("allocated_bytes", value.allocated_bytes);
  visit("reserved_bytes", value.reserved_bytes);
  visit("phase", value.phase);
  visit("step", value.step);
  visit.or_null("node", value.node);
  visit.or_null("op", value.op);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit.or_null("inner_source", value.inner_source);
  visit.or_null("autocast", value.autocast);
}

template <class Visitor, Either<ReportFailure> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("phase", value.phase);
  visit("step", value.step);
  visit.or_null("node", value.node);
  visit.or_null("op", value.op);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit.or_null("inner_source", value.inner_source);
  visit.or_null("inner_op", value.inner_op);
  visit("requested_bytes", value.requested_bytes);
  visit("allocated_bytes", value.allocated_bytes);
  visit("reserved_bytes", value.reserved_bytes);
  visit("free_bytes", value.free_bytes);
  visit("time_ns", value.time_ns);
  visit.or_null("requested_for", value.requested_for);
  visit("stack", value.stack);
  visit("native_stack", value.native_stack);
  visit.or_null("autocast", value.autocast);
  visit.or_null("parameter_group", value.parameter_group);
}

template <class Visitor, Either<ReportOwner> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("category", value.category);
  visit("bytes", value.bytes);
  visit.or_null("name", value.name);
  visit.or_null("shape", value.shape);
  visit("used_by", value.used_by);
  visit.or_null("autocast", value.autocast);
  visit.or_null("parameter_group", value.parameter_group);
}

template <class Visitor, Either<ReportHolder> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("category", value.category);
  visit.or_null("name", value.name);
  visit.or_null("kind", value.kind);
  visit.or_null("op", value.op);
  visit.or_null("source", value.source);
  visit.or_null("shape", value.shape);
  visit.or_null("used_by", value.used_by);
  visit("bytes", value.bytes);
  visit("blocks", value.blocks);
  visit("copies", value.copies);
  visit("block_bytes", value.block_bytes);
}

template <class Visitor, Either<ReportBlockedSegment> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("bytes", value.bytes);
  visit("largest_free_block_bytes", value.largest_free_block_bytes);
  visit("used_bytes", value.used_bytes);
  visit("blocked_by", value.blocked_by);
}

template <class Visitor, Either<NonPytorchOwner> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("owner", value.owner);
  visit.or_null("kind", value.kind);
  visit("bytes", value.bytes);
}

template <class Visitor, Either<PinnedHostMemory> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("owner", value.owner);
  visit.or_null("op", value.op);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit.or_null("inner_source", value.inner_source);
  visit("bytes", value.bytes);
  visit("blocks", value.blocks);
}

template <class Visitor, Either<InitializationStep> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("step", value.name);
  visit("bytes", value.bytes);
}

template <class Visitor, Either<StepNeed> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("bytes", value.bytes);
  visit("complete", value.whole);
  visit("modules_to_come", value.more_comes);
  visit("next_bytes", value.next_bytes);
}

template <class Visitor, Either<Imbalance> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("fullest_bytes", value.fullest_bytes);
  visit("others_bytes", value.others_bytes);
  visit("even_bytes", value.even_bytes);
}

template <class Visitor, Either<FailureFacts> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("requested_bytes", value.requested_bytes);
  visit("segment_bytes", value.segment_bytes);
  visit("is_workspace", value.is_workspace);
  visit("forward_continues", value.forward_continues);
  visit.or_null("library", value.library);
  visit("releasable_bytes", value.releasable_bytes);
  visit("total_bytes", value.total_bytes);
  visit("total_is_known", value.total_is_known);
  visit("free_bytes", value.free_bytes);
  visit("reserved_bytes", value.reserved_bytes);
  visit("cached_bytes", value.cached_bytes);
  visit("usable_cached_bytes", value.usable_cached_bytes);
  visit("other_pools_cached_bytes", value.other_pools_cached_bytes);
  visit("largest_free_block_bytes", value.largest_free_block_bytes);
  visit("pending_free_bytes", value.pending_free_bytes);
  visit("non_pytorch_bytes", value.non_pytorch_bytes);
  visit("usual_non_pytorch_bytes", value.usual_non_pytorch_bytes);
  visit("allowed_bytes", value.allowed_bytes);
  visit("limit_is_inferred", value.limit_is_inferred);
  visit("grown_bytes", value.grown_bytes);
  visit("bytes_per_step", value.bytes_per_step);
  visit("grown_until_step", value.grown_until_step);
  visit("step", value.step);
  visit("imbalance", value.imbalance);
  visit("complete_run_allocated_bytes", value.complete_run_allocated_bytes);
  visit("complete_run_reserved_bytes", value.complete_run_reserved_bytes);
}

template <class Visitor, Either<ReportCause> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("kind", value.kind);
  visit.or_null("because", value.because);
  visit("short_by_bytes", value.short_by_bytes);
  visit("evidence", value.evidence);
  visit("blocked_segments", value.pinned);
  visit("non_pytorch", value.non_pytorch);
}

template <class Visitor, Either<ReportCard> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("allocated_bytes", value.allocated_bytes);
  visit("pending_free_bytes", value.pending_free_bytes);
  visit("cached_bytes", value.cached_bytes);
  visit("non_pytorch_bytes", value.non_pytorch_bytes);
  visit("free_bytes", value.free_bytes);
}

template <class Visitor, Either<ReportSavedTensor> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("bytes", value.bytes);
  visit("shape", value.shape);
  visit.or_null("dtype", value.dtype);
  visit.or_null("made_by", value.made_by);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit("saved_by", value.saved_by);
  visit("saved_by_modules", value.saved_by_modules);
}

template <class Visitor, Either<Reason> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("id", value.id);
  visit("text", value.text);
  visit("bytes", value.bytes);
  visit.or_null("fix", value.fix);
  visit("how", value.how);
}

template <class Visitor, Either<Fix> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("id", value.id);
  visit("label", value.label);
  visit.or_null("formula", value.formula);
  visit("modules", value.modules);
  visit("ids", value.ids);
  visit("how", value.how);
  visit.or_null("costs", value.costs);
  visit("changes_training", value.changes_training);
  visit("predicted_peak_bytes", value.predicted_peak_bytes);
  visit("at_least", value.at_least);
  visit("measured_peak_bytes", value.measured_peak_bytes);
  visit("fits", value.fits);
  visit("predicted_fits", value.predicted_fits);
  visit("postpones_to_step", value.postpones_to_step);
}

template <class Visitor, Either<ReportGrowingPlace> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.or_null("op", value.op);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit("bytes_per_step", value.bytes_per_step);
  visit("live_bytes", value.live_bytes);
  visit("blocks", value.blocks);
}

template <class Visitor, Either<ReportGrowth> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("kind", value.kind);
  visit("bytes_per_step", value.bytes_per_step);
  visit("grown_bytes", value.grown_bytes);
  visit("first_step", value.first_step);
  visit("last_step", value.last_step);
  visit.or_null("op", value.op);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit.or_null("referrer", value.referrer);
  visit("place_count", value.place_count);
  visit("places", value.places);
}

template <class Visitor, Either<OwnedBytes> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.or_null("name", value.name);
  visit("bytes", value.bytes);
  visit("blocks", value.blocks);
}

template <class Visitor, Either<Owners> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("module", value.module);
  visit("op", value.op);
  visit("source", value.source);
  visit("shape", value.shape);
  visit("line", value.line);
}

template <class Visitor, Either<ReportLifetime> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("category", value.category);
  visit("bytes", value.bytes);
  visit.or_null("name", value.name);
  visit.or_null("shape", value.shape);
  visit("made_in", value.made_in);
  visit("made_in_step", value.made_in_step);
  visit.or_null("op", value.op);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit("kept_by", value.kept_by);
  visit.or_null("freed_by_node", value.freed_by_node);
  visit.or_null("freed_by_module", value.freed_by_module);
}

template <class Visitor, Either<PhasePeak> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("step", value.step);
  visit("phase", value.phase);
  visit("peak_allocated_bytes", value.allocated_bytes);
}

template <class Visitor, Either<ReportPoint> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("time_ns", value.time_ns);
  visit("allocated_bytes", value.allocated_bytes);
  visit("reserved_bytes", value.reserved_bytes);
}

template <class Visitor, Either<ReportMark> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("name", value.name);
  visit("time_ns", value.time_ns);
  visit("step", value.step);
  visit("allocated_bytes", value.allocated_bytes);
  visit("reserved_bytes", value.reserved_bytes);
  visit("peak_allocated_bytes", value.peak_allocated_bytes);
}

template <class Visitor, Either<ReportRecovered> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.or_null("op", value.op);
  visit("requested_bytes", value.requested_bytes);
  visit("count", value.count);
  visit("granted_bytes", value.granted_bytes);
  visit.or_null("node", value.node);
}

template <class Visitor, Either<BatchModel> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("batch", value.batch);
  visit("fixed_bytes", value.fixed_bytes);
  visit("scaling_bytes", value.scaling_bytes);
  visit("largest_batch", value.largest_batch);
  visit("inferred", value.inferred);
}

template <class Visitor, Either<ReportCase> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("id", value.id);
  visit("about", value.about);
  visit("notes", value.notes);
  visit("figures", value.figures);
}

template <class Visitor, Either<ReportAutocast> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("dtype", value.dtype);
  visit("made_bytes", value.made_bytes);
  visit("cache_bytes", value.cache_bytes);
  visit("region_open", value.region_open);
}

template <class Visitor, Either<ReportParameterGroup> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.or_null("name", value.name);
  visit("parameter_bytes", value.parameter_bytes);
  visit("gradient_bytes", value.gradient_bytes);
  visit("optimizer_state_bytes", value.optimizer_state_bytes);
}

template <class Visitor, Either<ReportOfDevice> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("device", value.device);
  visit("peak", value.peak);
  visit("failure", value.failure);
  visit("cause", value.cause);
  visit("categories", value.categories);
  visit("card", value.card);
  visit("private_pools", value.private_pools);
  visit("non_pytorch", value.outside);
  visit("host_memory", value.host_memory);
  visit("pinned_host_memory", value.pinned_host_memory);
  visit("initialization_steps", value.initialization_steps);
  visit("failed_driver_requests", value.failed_driver_requests);
  visit("packing", value.packing);
  visit("headroom_bytes", value.headroom_bytes);
  visit("required_bytes", value.required_bytes);
  visit("replay_error_bytes", value.replay_error_bytes);
  visit("growth", value.growth);
  visit("out_of_memory_near_step", value.out_of_memory_near_step);
  visit("attribution", value.attribution);
  visit("allocations", value.allocations);
  visit("top_allocations", value.top_allocations);
  visit("allocated_by", value.allocated_by);
  visit("largest_allocation", value.largest_allocation);
  visit("autocast", value.autocast);
  visit("parameter_groups", value.parameter_groups);
  visit("saved_tensors", value.saved_tensors);
  visit("batch", value.batch);
  visit("reason", value.reason);
  visit("fixes", value.fixes);
  visit("phase_peaks", value.phase_peaks);
  visit("phases", value.phases);
  visit("timeline", value.timeline);
  visit("recovered_by_library", value.recovered_by_library);
  visit("caught", value.caught);
  visit("caught_count", value.caught_count);
  visit("marks", value.marks);
}

template <class Visitor, Either<ReportNote> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("kind", value.kind);
  visit("text", value.text);
}

template <class Visitor, Either<ReportWorkPart> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("name", value.name);
  visit("flops", value.flops);
  visit("memory_bytes", value.memory_bytes);
  visit("bus_bytes", value.bus_bytes);
  visit("launches", value.launches);
  visit("time_ns", value.time_ns);
  visit.or_null("bound_by", value.bound_by);
}

template <class Visitor, Either<ReportWork> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("step", value.step);
  visit("flops", value.flops);
  visit("flops_by_dtype", value.flops_by_dtype);
  visit("memory_bytes", value.memory_bytes);
  visit("bus_bytes", value.bus_bytes);
  visit("launches", value.launches);
  visit("not_metered", value.not_metered);
  visit("step_time_ns", value.step_time_ns);
  visit("step_time_low_ns", value.step_time_low_ns);
  visit("step_time_high_ns", value.step_time_high_ns);
  visit.or_null("bound_by", value.bound_by);
  visit("utilization_percent", value.utilization_percent);
  visit.or_null("why_no_time", value.why_no_time);
  visit("phases", value.phases);
  visit("modules", value.modules);
}

template <class Visitor, Either<ReportRank> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("rank", value.rank);
  visit("pid", value.pid);
  visit("outcome", value.outcome);
  visit("device", value.device);
  visit("peak", value.peak);
  visit("failure", value.failure);
  visit("cause", value.cause);
  visit("headroom_bytes", value.headroom_bytes);
  visit("folder", value.folder);
}

template <class Visitor, Either<ReportImbalance> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("rank", value.rank);
  visit("peak_bytes", value.peak_bytes);
  visit("median_of_others_bytes", value.median_of_others_bytes);
  visit("difference_bytes", value.difference_bytes);
}

}  // namespace oomdiag
