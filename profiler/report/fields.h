#pragma once

#include <concepts>

#include "profiler/report/report.h"

// The JSON names of everything in a report, once for both directions. A visitor is called as `visit(name, member)`, and as
// `visit.or_null(name, text)` for texts that are null in JSON when they are empty. `value` may be const (when writing).
namespace oomdiag {

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
}

template <class Visitor, Either<ReportFailure> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("phase", value.phase);
  visit("step", value.step);
  visit.or_null("node", value.node);
  visit.or_null("op", value.op);
  visit.or_null("module", value.module);
  visit.or_null("source", value.source);
  visit.or_null("inner_op", value.inner_op);
  visit("requested_bytes", value.requested_bytes);
  visit("allocated_bytes", value.allocated_bytes);
  visit("reserved_bytes", value.reserved_bytes);
  visit("free_bytes", value.free_bytes);
  visit.or_null("wanted", value.wanted);
}

template <class Visitor, Either<ReportOwner> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("category", value.category);
  visit("bytes", value.bytes);
  visit.or_null("name", value.name);
  visit.or_null("shape", value.shape);
  visit("used_by", value.used_by);
}

template <class Visitor, Either<ReportPinnedSegment> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("bytes", value.bytes);
  visit("largest_hole_bytes", value.largest_hole_bytes);
  visit("used_bytes", value.used_bytes);
  visit("pinned_by", value.pinned_by);
}

template <class Visitor, Either<ReportCause> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("kind", value.kind);
  visit("short_by_bytes", value.short_by_bytes);
  visit("evidence", value.evidence);
  visit("pinned_segments", value.pinned);
}

template <class Visitor, Either<ReportCard> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("allocated_bytes", value.allocated_bytes);
  visit("pending_free_bytes", value.pending_free_bytes);
  visit("cached_bytes", value.cached_bytes);
  visit("outside_pytorch_bytes", value.outside_pytorch_bytes);
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

template <class Visitor, Either<ReportRemedy> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("id", value.id);
  visit("label", value.label);
  visit("predicted_peak_bytes", value.predicted_peak_bytes);
  visit("measured_peak_bytes", value.measured_peak_bytes);
  visit("fits", value.fits);
  visit("predicted_fits", value.predicted_fits);
}

template <class Visitor, Either<ReportPhase> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("step", value.step);
  visit("phase", value.phase);
  visit("peak_allocated_bytes", value.peak_allocated_bytes);
}

template <class Visitor, Either<ReportPoint> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("time_ns", value.time_ns);
  visit("allocated_bytes", value.allocated_bytes);
  visit("reserved_bytes", value.reserved_bytes);
}

template <class Visitor, Either<ReportAbsorbed> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.or_null("op", value.op);
  visit("requested_bytes", value.requested_bytes);
  visit("count", value.count);
}

template <class Visitor, Either<ReportBatch> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("batch", value.batch);
  visit("fixed_bytes", value.fixed_bytes);
  visit("scaling_bytes", value.scaling_bytes);
  visit("largest_batch", value.largest_batch);
}

template <class Visitor, Either<ReportCase> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("id", value.id);
  visit("about", value.about);
  visit("notes", value.notes);
  visit("figures", value.figures);
}

template <class Visitor, Either<ReportOfDevice> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit("device", value.device);
  visit("peak", value.peak);
  visit("failure", value.failure);
  visit("cause", value.cause);
  visit("categories", value.categories);
  visit("card", value.card);
  visit("packing", value.packing);
  visit("headroom_bytes", value.headroom_bytes);
  visit("replay_error_bytes", value.replay_error_bytes);
  visit("attribution", value.attribution);
  visit("owners", value.owners);
  visit("saved_tensors", value.saved_tensors);
  visit("batch", value.batch);
  visit("remedies", value.remedies);
  visit("phases", value.phases);
  visit("timeline", value.timeline);
  visit("absorbed", value.absorbed);
  visit("caught", value.caught);
}

}  // namespace oomdiag
