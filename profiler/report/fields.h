#pragma once

#include <concepts>
#include <initializer_list>

#include "profiler/explain/causes.h"
#include "profiler/explain/facts.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/growth.h"
#include "profiler/explain/imbalance.h"
#include "profiler/explain/owners.h"
#include "profiler/explain/reasons.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"

// The report's JSON: each field once, with its name, its member and what it says. Writing, reading, the JSON schema and
// docs/report-schema.md come from this file (scripts/report_schema writes the last two).
//
// A visitor is called as
//   visit.object(name, about)                    first: what the schema calls the object
//   visit(field, member)
//   visit.or_null(field, text)                   a text that is null in JSON when it is empty
//   visit.figures(field, member, {field, …})     figures whose names are fixed
//   visit.constant(field, text)                  the same in each report
// `value` may be const (when writing). A name ends with its unit: _bytes, _ns, _percent; other integers are counts.
namespace oomdiag {

struct Field {
  const char* name;
  const char* about;                           ///< half a sentence, in Markdown
  std::initializer_list<const char*> words{};  ///< of a text: all that it can be; empty: anything
  bool may_be_negative = false;
};

inline constexpr bool kMayBeNegative = true;

/// How many names an enum has: its values are 0, 1, 2, …, and name_of gives each.
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

/// The place in the program: those of its parts that `value` has.
template <class Visitor, class Value>
void visit_place(Visitor& visit, Value& value) {
  if constexpr (requires { value.node; }) visit.or_null({"node", "autograd node, in backward"}, value.node);
  if constexpr (requires { value.op; })
    visit.or_null({"op", "operator; in backward the forward op that made the node"}, value.op);
  visit.or_null({"module", "path of the module"}, value.module);
  visit.or_null({"source", "the user's line"}, value.source);
  if constexpr (requires { value.inner_source; })
    visit.or_null({"inner_source", "line of a package inside of `source`"}, value.inner_source);
}

/// What a step or a part of it does.
template <class Visitor, class Value>
void visit_work(Visitor& visit, Value& value) {
  visit({"flops", "of matrix products, convolutions, attention and RNNs, a multiplication and an addition being two"},
        value.flops);
  visit({"memory_bytes", "traffic of the GPU's memory, each input read once and each output written once"},
        value.memory_bytes);
  visit({"bus_bytes", "copies between host and GPU"}, value.bus_bytes);
  visit({"launches", "of kernels"}, value.launches);
}

template <class Visitor, class Value>
void visit_bound(Visitor& visit, Value& value) {
  visit.or_null({"bound_by",
                 "what most of the time goes to",
                 {"compute", "memory bandwidth", "bus", "launches", "host", "communication"}},
                value.bound_by);
}

template <class Visitor, Either<ReportDevice> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("device", "A GPU.");
  visit({"index", "as the program counts"}, value.index);
  visit({"name", "as the runtime reports it"}, value.name);
  visit({"virtual", "it was not there: a virtual device"}, value.virtual_device);
  visit({"total_bytes", "as the runtime reports them"}, value.total_bytes);
  visit({"compute_capability", "\"8.9\""}, value.compute_capability);
  visit({"allowed_bytes", "that PyTorch may reserve, where its settings have a `per_process_memory_fraction`"},
        value.allowed_bytes);
}

template <class Visitor, Either<ReportPeak> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("peak", "The moment at which the most bytes were allocated, and what allocated last before it.");
  visit({"allocated_bytes", "max_memory_allocated of a program that never resets it"}, value.allocated_bytes);
  visit({"reserved_bytes", "max_memory_reserved likewise"}, value.reserved_bytes);
  visit({"phase", "in which"}, value.phase);
  visit({"step", "in which"}, value.step);
  visit_place(visit, value);
  visit.or_null({"autocast", "dtype of the autocast region around it"}, value.autocast);
  visit({"host_memory_bytes",
         "of reserved_bytes at least so many had no room on the GPU: Windows' driver keeps them in host memory"},
        value.host_memory_bytes);
}

template <class Visitor, Either<ReportFailure> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("failure", "A request that failed, and the state then, before anything was unwound.");
  visit({"phase", "in which"}, value.phase);
  visit({"step", "in which"}, value.step);
  visit_place(visit, value);
  visit.or_null({"inner_op", "the operator inside of `op`, in backward inside of `node`, that allocated"},
                value.inner_op);
  visit({"requested_bytes", "as the allocator rounds them"}, value.requested_bytes);
  visit({"allocated_bytes", "then"}, value.allocated_bytes);
  visit({"reserved_bytes", "then"}, value.reserved_bytes);
  visit({"free_bytes", "of the device, then"}, value.free_bytes);
  visit({"time_ns", "by the clock of `timeline`"}, value.time_ns);
  visit.or_null({"requested_for", "\"gradient of relu3, [6720, 128, 16, 16] float32\""}, value.requested_for);
  visit({"stack", "calls that led to `source`, innermost first"}, value.stack);
  visit({"native_stack", "C++ calls, where they were asked for"}, value.native_stack);
  visit.or_null({"autocast", "dtype of the autocast region around the op"}, value.autocast);
  visit.or_null({"parameter_group", "that an optimizer's step was at, of several"}, value.parameter_group);
}

template <class Visitor, Either<ReportOwner> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("allocation", "A block in use.");
  visit({"category", "of the block"}, value.category);
  visit({"bytes", "of the block"}, value.bytes);
  visit.or_null({"name", "where it is made: a module, else an op, else a line"}, value.name);
  visit.or_null({"shape", "shape and dtype"}, value.shape);
  visit({"used_by", "modules whose backward keeps it"}, value.used_by);
  visit.or_null({"autocast", "dtype of the autocast region that it was made in"}, value.autocast);
  visit.or_null({"parameter_group", "of an optimizer with several: \"AdamW, group 1\""}, value.parameter_group);
}

template <class Visitor, Either<ReportFromStacks> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("from_stacks", "What the stacks of a memory snapshot say of a category.");
  visit({"category", "of the blocks"}, value.category);
  visit({"confidence", "of the rule that named it", {"high", "medium", "low"}}, value.confidence);
  visit({"bytes", "allocated, at that moment"}, value.bytes);
}

template <class Visitor, Either<ReportHolder> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("top_allocation", "Blocks that are alike, as the same tensor of each layer, folded into one.");
  visit({"category", "of the blocks"}, value.category);
  visit.or_null({"name", "module or parameter, indices of layers folded: `transformer.h.*.mlp.act`"}, value.name);
  visit.or_null({"kind", "what people call it", {"logits", "loss", "cast"}}, value.kind);
  visit.or_null({"op", "null where they differ"}, value.op);
  visit.or_null({"source", "null where they differ"}, value.source);
  visit.or_null({"shape", "null where they differ"}, value.shape);
  visit.or_null({"used_by", "null where they differ"}, value.used_by);
  visit.or_null(
      {"referrer", "variable of the program that refers to the tensor as the interpreter ends; null where they differ"},
      value.referrer);
  visit({"bytes", "of all that were folded"}, value.bytes);
  visit({"blocks", "how many"}, value.blocks);
  visit({"copies", "modules or parameters that were folded"}, value.copies);
  visit({"block_bytes", "of each block, where they are equal; else 0"}, value.block_bytes);
}

template <class Visitor, Either<ReportBlockedSegment> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("blocked_segment", "A segment whose blocks in use keep its free blocks from serving the request.");
  visit({"bytes", "of the segment"}, value.bytes);
  visit({"largest_free_block_bytes", "in it"}, value.largest_free_block_bytes);
  visit({"used_bytes", "of its blocks in use"}, value.used_bytes);
  visit({"blocked_by", "the largest of them"}, value.blocked_by);
}

template <class Visitor, Either<NonPytorchOwner> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("non_pytorch_owner", "Somebody who holds memory that PyTorch's allocator does not count.");
  visit({"owner", "a shared object, `context`, `modules`, `process <pid> <name>` or `unexplained`"}, value.owner);
  visit.or_null(
      {"kind", "how it was asked for", {"device", "handle", "pool", "array", "managed", "pinned", "process", "system"}},
      value.kind);
  visit({"bytes", "held", {}, kMayBeNegative}, value.bytes);
}

template <class Visitor, Either<PinnedHostMemory> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("pinned_host_memory",
               "Pinned host memory by the place that asked for it; null where that is not known.");
  visit({"owner", "the library that asked the driver"}, value.owner);
  visit_place(visit, value);
  visit({"bytes", "held"}, value.bytes);
  visit({"blocks", "how many"}, value.blocks);
}

template <class Visitor, Either<InitializationStep> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("initialization_step", "Free memory that went when something was initialised.");
  visit({"step", "`cuInit`, `context`, `modules of …`"}, value.name);
  visit({"bytes", "that free memory went down by", {}, kMayBeNegative}, value.bytes);
}

template <class Visitor, Either<StepNeed> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("step_need", "What the step needs.");
  visit({"bytes", "the most that the step allocates at once"}, value.bytes);
  visit({"complete", "false: `bytes` is a lower bound"}, value.whole);
  visit({"modules_to_come", "modules with parameters had not been called yet"}, value.more_comes);
  visit({"next_bytes", "of the next step at the same point, which holds the optimizer's state as well; 0: no more"},
        value.next_bytes);
}

template <class Visitor, Either<Imbalance> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("uneven_share", "What the devices or ranks of a program hold, compared.");
  visit({"fullest_bytes", "peak of the one that failed"}, value.fullest_bytes);
  visit({"others_bytes", "median of the others"}, value.others_bytes);
  visit({"even_bytes", "what each would hold if all held the same"}, value.even_bytes);
}

template <class Visitor, Either<FailureFacts> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("evidence", "The facts that the choice of a cause rests on.");
  visit({"requested_bytes", "of the block that was requested"}, value.requested_bytes);
  visit({"segment_bytes", "that the allocator asks the driver for"}, value.segment_bytes);
  visit({"is_workspace", "it was scratch space of cuBLAS or cuDNN, not a tensor"}, value.is_workspace);
  visit({"forward_continues", "it failed in forward, where more is saved later"}, value.forward_continues);
  visit({"kept_alike", "blocks in use of its size that the same op at the same line made: a loop keeps each"},
        value.kept_alike);
  visit.or_null({"library", "that asked the driver itself"}, value.library);
  visit({"releasable_bytes", "what `empty_cache()` would free for it"}, value.releasable_bytes);
  visit({"total_bytes", "of the device"}, value.total_bytes);
  visit({"total_is_known", "false where a snapshot does not record it"}, value.total_is_known);
  visit({"free_bytes", "of the device", {}, kMayBeNegative}, value.free_bytes);
  visit({"reserved_bytes", "by PyTorch"}, value.reserved_bytes);
  visit({"cached_bytes", "reserved, not allocated"}, value.cached_bytes);
  visit({"usable_cached_bytes", "of those, what this request may use: in segments with blocks in use, of its own pool"},
        value.usable_cached_bytes);
  visit({"other_pools_cached_bytes", "cached in pools that do not serve this request"}, value.other_pools_cached_bytes);
  visit({"largest_free_block_bytes", "in the pool of the request"}, value.largest_free_block_bytes);
  visit({"pending_free_bytes", "freed, in use on another stream"}, value.pending_free_bytes);
  visit({"non_pytorch_bytes", "in use by others than PyTorch's allocator", {}, kMayBeNegative},
        value.non_pytorch_bytes);
  visit({"usual_non_pytorch_bytes", "what any process takes of it"}, value.usual_non_pytorch_bytes);
  visit({"allowed_bytes", "the limit that the program set, or all of the device"}, value.allowed_bytes);
  visit({"limit_is_inferred", "at most that much, as the limit is not recorded"}, value.limit_is_inferred);
  visit({"grown_bytes", "from step to step, in all", {}, kMayBeNegative}, value.grown_bytes);
  visit({"bytes_per_step", "by which it grows", {}, kMayBeNegative}, value.bytes_per_step);
  visit({"grown_until_step", "the last step of the growth"}, value.grown_until_step);
  visit({"step", "what the step needs"}, value.step);
  visit({"imbalance", "between the devices or ranks of the program"}, value.imbalance);
  visit({"complete_run_allocated_bytes", "peak of a complete run on a larger device, where one was made"},
        value.complete_run_allocated_bytes);
  visit({"complete_run_reserved_bytes", "likewise"}, value.complete_run_reserved_bytes);
}

template <class Visitor, Either<ReportCause> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("cause", "Why the request failed.");
  visit({"kind", "the one primary cause"}, value.kind);
  visit.or_null({"because", "which of the reasons of that kind: a row of `kCauses` in profiler/explain/causes.cpp"},
                value.because);
  visit({"short_by_bytes", "what is missing even if every cached byte could be used; 0: nothing is missing now"},
        value.short_by_bytes);
  visit({"evidence", "the facts that the choice rests on"}, value.evidence);
  visit({"blocked_segments", "where free and cached bytes would be enough: those with the largest free blocks"},
        value.blocked_segments);
  visit({"non_pytorch", "of non-PyTorch memory: who holds it"}, value.non_pytorch);
}

template <class Visitor, Either<ReportMemory> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("device_memory", "How the bytes of the device were spent at that moment; the five add up to its total.");
  visit({"allocated_bytes", "in blocks of tensors"}, value.allocated_bytes);
  visit({"pending_free_bytes", "freed, but still in use on another stream"}, value.pending_free_bytes);
  visit({"cached_bytes", "reserved, not allocated"}, value.cached_bytes);
  visit({"non_pytorch_bytes", "what PyTorch does not count"}, value.non_pytorch_bytes);
  visit({"free_bytes", "the rest"}, value.free_bytes);
}

template <class Visitor, Either<ReportSavedTensor> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("saved_tensor", "A tensor that autograd keeps for backward.");
  visit({"bytes", "of its storage"}, value.bytes);
  visit({"shape", "its sizes"}, value.shape);
  visit.or_null({"dtype", "`float32`"}, value.dtype);
  visit.or_null({"made_by", "the op that made it"}, value.made_by);
  visit_place(visit, value);
  visit({"saved_by", "the nodes that keep it"}, value.saved_by);
  visit({"saved_by_modules", "their modules"}, value.saved_by_modules);
}

template <class Visitor, Either<Reason> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("reason", "What of the program is behind the cause.");
  visit({"id", "a row of `kReasons` in profiler/explain/reasons.cpp: `recurrent_state`, `key_value_cache`, …"},
        value.id);
  visit({"text", "the same in a sentence, with its line"}, value.text);
  visit({"bytes", "that it holds or requests"}, value.bytes);
  visit.or_null({"fix", "the `id` of the fix that cures it"}, value.fix);
  visit({"how", "lines to change, where they are not that fix's own"}, value.how);
}

template <class Visitor, Either<Fix> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("fix", "A change that would lower the peak.");
  visit({"id", "a row of `kFixes` in profiler/explain/fixes.cpp: `autocast_bf16`"}, value.id);
  visit({"label", "its name for people"}, value.label);
  visit.or_null({"formula", "how the peak was computed"}, value.formula);
  visit({"modules", "it is about, as those to checkpoint"}, value.modules);
  visit({"ids", "of a combination: the fixes that it is made of"}, value.ids);
  visit({"how", "lines to paste"}, value.how);
  visit.or_null({"costs", "what it costs"}, value.costs);
  visit({"changes_training", "what is learned is not the same any more"}, value.changes_training);
  visit({"saves_little", "where a lower bound is all that is known: more than three quarters of what the step needs"},
        value.saves_little);
  visit({"predicted_peak_bytes",
         "computed; of a fix with `frees_bytes` what had been allocated at the failure, without these"},
        value.predicted_peak_bytes);
  visit({"frees_bytes", "of a cure whose peak is not known: what it frees of what had been allocated"},
        value.frees_bytes);
  visit({"at_least", "the prediction is only a lower bound, as no complete step was seen"}, value.at_least);
  visit({"measured_peak_bytes", "of a run with it"}, value.measured_peak_bytes);
  visit({"fits", "measured; null where it was not run"}, value.fits);
  visit({"predicted_fits", "computed; null where the lower bound says nothing"}, value.predicted_fits);
  visit({"postpones_to_step", "in a leak, of all fixes but the cure: about the step that runs out of memory with it"},
        value.postpones_to_step);
}

template <class Visitor, Either<Advice> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("advice", "A reason, and the fixes with its cure.");
  visit({"reason", "what of the program is behind it"}, value.reason);
  visit({"fixes", "what would lower the peak"}, value.fixes);
}

template <class Visitor, Either<ReportGrowingPlace> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("growing_place", "A place that keeps more with each step.");
  visit_place(visit, value);
  visit({"bytes_per_step", "that it adds", {}, kMayBeNegative}, value.bytes_per_step);
  visit({"live_bytes", "at the end"}, value.live_bytes);
  visit({"blocks", "at the end"}, value.blocks);
}

template <class Visitor, Either<ReportGrowth> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object(
      "growth",
      "What more lives at the end of each step, for one reason; the place is that of the tensor that holds the rest.");
  visit({"kind", "why it grows"}, value.kind);
  visit({"bytes_per_step", "that each step adds", {}, kMayBeNegative}, value.bytes_per_step);
  visit({"grown_bytes", "over all steps", {}, kMayBeNegative}, value.grown_bytes);
  visit({"first_step", "in which it was seen"}, value.first_step);
  visit({"last_step", "in which it was seen"}, value.last_step);
  visit_place(visit, value);
  visit.or_null(
      {"referrer", "variable of the program that keeps it as the interpreter ends: \"list 'history' in train.py\""},
      value.referrer);
  visit({"place_count", "how many places grow"}, value.place_count);
  visit({"places", "the fastest of them, at most 10"}, value.places);
}

template <class Visitor, Either<OwnedBytes> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("allocated_bytes_of", "One row of `allocated_by`.");
  visit.or_null({"name", "of the module, op, line or shape"}, value.name);
  visit({"bytes", "in use"}, value.bytes);
  visit({"blocks", "in use"}, value.blocks);
}

template <class Visitor, Either<Owners> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object(
      "allocated_by",
      "The bytes in use, largest first; at most 100 rows each. All lists but `module` add up to `allocated_bytes`.");
  visit({"module", "a module holds what the modules inside of it hold"}, value.module);
  visit({"op", "by operator"}, value.op);
  visit({"source", "by the user's line"}, value.source);
  visit({"shape", "by shape and dtype"}, value.shape);
  visit({"line", "by the innermost line outside of torch"}, value.line);
}

template <class Visitor, Either<ReportLifetime> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("largest_allocation", "The largest block in use, from alloc to free.");
  visit({"category", "of the block"}, value.category);
  visit({"bytes", "of the block"}, value.bytes);
  visit.or_null({"name", "where it is made: a module, else an op, else a line"}, value.name);
  visit.or_null({"shape", "shape and dtype"}, value.shape);
  visit({"made_in", "phase"}, value.made_in);
  visit({"made_in_step", "0: before the first"}, value.made_in_step);
  visit_place(visit, value);
  visit({"kept_by", "who keeps it"}, value.kept_by);
  visit.or_null({"freed_by_node", "autograd node whose backward frees it"}, value.freed_by_node);
  visit.or_null({"freed_by_module", "module of that node"}, value.freed_by_module);
}

template <class Visitor, Either<PhasePeak> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("phase_of_step", "The peak of a phase of a step.");
  visit({"step", "which"}, value.step);
  visit({"phase", "which"}, value.phase);
  visit({"peak_allocated_bytes", "in it"}, value.allocated_bytes);
}

template <class Visitor, Either<ReportPoint> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("point", "The state at one time of the run.");
  visit({"time_ns", "since recording began"}, value.time_ns);
  visit({"allocated_bytes", "then"}, value.allocated_bytes);
  visit({"reserved_bytes", "then"}, value.reserved_bytes);
}

template <class Visitor, Either<Mark> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("mark", "A place in the run that the program named by `oomdiag.mark`.");
  visit({"name", "that the program gave"}, value.name);
  visit({"time_ns", "by the clock of `timeline`"}, value.time_ns);
  visit({"step", "in which"}, value.step);
  visit({"allocated_bytes", "then"}, value.allocated_bytes);
  visit({"reserved_bytes", "then"}, value.reserved_bytes);
  visit({"peak_allocated_bytes", "since the mark before"}, value.peak_allocated_bytes);
}

template <class Visitor, Either<ReportRecovered> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("recovered_by_library",
               "Requests whose failure a library caught inside of an op, to go on with a slower plan.");
  visit.or_null({"op", "inside of which"}, value.op);
  visit({"requested_bytes", "of each"}, value.requested_bytes);
  visit({"count", "how often"}, value.count);
  visit({"granted_bytes", "the workspace that the op went on with; 0: a plan without one"}, value.granted_bytes);
  visit.or_null({"node", "autograd node, in backward"}, value.node);
}

template <class Visitor, Either<BatchModel> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("batch", "How the peak follows the batch size.");
  visit({"batch", "examples of a step, as given or inferred from shapes"}, value.batch);
  visit({"fixed_bytes", "of the peak: what stays", {}, kMayBeNegative}, value.fixed_bytes);
  visit({"scaling_bytes", "of the peak: what grows with the batch"}, value.scaling_bytes);
  visit({"largest_batch", "that should still fit"}, value.largest_batch);
  visit({"inferred", "the batch size was not given: it is read from shapes"}, value.inferred);
}

template <class Visitor, Either<ReportCase> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("case", "What a run of a reference model shows about its case.");
  visit({"id", "\"S10\""}, value.id);
  visit({"about", "\"training without zero_grad\""}, value.about);
  visit({"notes", "sentences, and tables whose lines begin with two spaces"}, value.notes);
  visit({"figures", "what they are made from"}, value.figures);
}

template <class Visitor, Either<AutocastUse> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("autocast", "What autocast takes at that moment.");
  visit({"dtype", "that autocast casts to", {"float16", "bfloat16"}}, value.dtype);
  visit({"made_bytes", "alive, and made by forward ops under autocast"}, value.made_bytes);
  visit({"cache_bytes", "of these: casts of weights, kept until the region ends"}, value.cache_bytes);
  visit({"repeated_bytes", "casts of weights that were cast before"}, value.repeated_bytes);
  visit({"repeated_count", "how many these are"}, value.repeated_count);
  visit({"region_open", "that moment lies inside of the region"}, value.region_open);
}

template <class Visitor, Either<ReportParameterGroup> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("parameter_group",
               "What a parameter group of an optimizer takes; the groups add up to the three categories.");
  visit.or_null({"name", "\"AdamW, group 1\"; null, the last: what is in no group that is known"}, value.name);
  visit({"parameter_bytes", "of the group"}, value.parameter_bytes);
  visit({"gradient_bytes", "of the group"}, value.gradient_bytes);
  visit({"optimizer_state_bytes", "of the group"}, value.optimizer_state_bytes);
}

template <class Visitor, Either<ReportOfDevice> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("device_report",
               "All that is said of one device. *That moment* is the one of the failure, else that of the peak.");
  visit({"device", "which device"}, value.device);
  visit({"peak", "the moment at which the most bytes were allocated"}, value.peak);
  visit({"failure", "the request that failed and ended the program"}, value.failure);
  visit({"cause", "why it failed"}, value.cause);
  visit.figures({"categories", "allocated bytes of that moment, by what they are; empty where nothing was allocated"},
                value.categories,
                {{"parameter", "of modules"},
                 {"buffer", "of modules"},
                 {"gradient", "of parameters"},
                 {"optimizer_state", "made by an optimizer's step"},
                 {"activation", "saved for backward"},
                 {"input", "made outside of modules, before them"},
                 {"output", "live, made by a forward op, not saved"},
                 {"activation_gradient", "made and used up in backward"},
                 {"temporary", "freed by the op that made it"},
                 {"workspace", "of cuBLAS and cuDNN"},
                 {"unknown", "not known; never spread over the others"}});
  visit({"from_stacks", "of a memory snapshot: so many bytes of a category with this confidence; empty of a recording"},
        value.from_stacks);
  visit({"card", "how the bytes of the device were spent at that moment"}, value.memory);
  visit.figures(
      {"private_pools", "of MemPools and CUDA graphs, which serve nobody else; empty where there are none"},
      value.private_pools,
      {{"reserved_bytes", "in their segments"}, {"cached_bytes", "of these, not allocated: part of `card`'s"}});
  visit({"non_pytorch",
         "who holds `card.non_pytorch_bytes`; adds up to it, the last is `unexplained` and may be negative"},
        value.non_pytorch);
  visit({"host_memory", "pinned memory of the host, and managed memory, which may be on either side"},
        value.host_memory);
  visit({"pinned_host_memory", "by the 8 places that asked for most; PyTorch keeps such blocks for whoever asks next"},
        value.pinned_host_memory);
  visit({"initialization_steps", "free memory that went when something was initialised, in order"},
        value.initialization_steps);
  visit({"failed_driver_requests", "requests of libraries that the driver failed: the largest of each"},
        value.failed_driver_requests);
  visit.figures({"packing", "what fragmentation costs at that moment"}, value.packing,
                {{"load_bytes", "in use"},
                 {"pack_bytes", "what a perfect packer would reserve for them"},
                 {"reserved_bytes", "by PyTorch"},
                 {"total_bytes", "of the device"}});
  visit({"headroom_bytes", "what is left of the device at the peak"}, value.headroom_bytes);
  visit({"required_bytes", "the smallest device on which that moment would pass, predicted"}, value.required_bytes);
  visit(
      {"replay_error_bytes", "by how much the replay differs from what the allocator itself counted; 0 is to the byte"},
      value.replay_error_bytes);
  visit({"growth", "what more lives at the end of each step, by reason"}, value.growth);
  visit({"out_of_memory_near_step", "of a run that fits and grows: about where it will run out of memory"},
        value.out_of_memory_near_step);
  visit.figures({"attribution", "of the bytes that were requested in backward, those that could be traced"},
                value.attribution,
                {{"backward_bytes", "requested in backward"},
                 {"with_node_bytes", "… of which the autograd node is known"},
                 {"with_forward_op_bytes", "… and the forward op that made it"},
                 {"with_module_bytes", "… and the module in which that op ran"},
                 {"with_source_bytes", "… and its line"},
                 {"accumulate_bytes", "by AccumulateGrad, which has no forward op"}});
  visit({"allocations", "the largest blocks of that moment, at most 50"}, value.allocations);
  visit({"top_allocations", "the same, alike layers folded into one: at most 8 of a category"}, value.top_allocations);
  visit({"allocated_by", "the allocated bytes of that moment, by place"}, value.allocated_by);
  visit({"largest_allocation", "the largest block in use"}, value.largest_allocation);
  visit({"autocast", "what autocast takes"}, value.autocast);
  visit({"parameter_groups", "what each group of an optimizer takes, where there are several, the largest first"},
        value.parameter_groups);
  visit({"saved_tensors", "what autograd keeps for backward, the largest 200"}, value.saved_tensors);
  visit({"batch", "how the peak follows the batch size"}, value.batch);
  visit({"reason", "what of the program is behind the cause"}, value.reason);
  visit({"fixes", "what would lower the peak"}, value.fixes);
  visit({"besides",
         "what else is behind it; of fragmentation it takes the place of both where a complete run shows that the step "
         "does not fit even packed"},
        value.besides);
  visit({"phase_peaks", "the highest allocated bytes of each phase, over all steps"}, value.phase_peaks);
  visit({"phases", "the peak of each phase of each step that is described"}, value.phases);
  visit({"timeline", "at most 2 000 points over the run, the peak always among them"}, value.timeline);
  visit({"recovered_by_library", "failed requests that a library caught, to go on with a slower plan"},
        value.recovered_by_library);
  visit({"caught", "failed requests that the program caught; the first 50"}, value.caught);
  visit({"caught_count", "how many there were"}, value.caught_count);
  visit({"caught_at_least", "there may have been more, in events that were overwritten"}, value.caught_at_least);
  visit({"marks", "places in the run that the program itself named"}, value.marks);
}

template <class Visitor, Either<RecorderNote> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("note", "What the recorder or the virtual device had to say, word for word.");
  visit({"kind", "`estimate`, `unsupported`, `snapshot`, …"}, value.kind);
  visit({"text", "which function or area"}, value.text);
}

template <class Visitor, Either<ReportWorkPart> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("work_part", "The work of a phase or a module in a step; the fields are those of `work`.");
  visit(
      {"name", "of the phase, `recomputation` being what checkpoints run again in backward, or the path of the module"},
      value.name);
  visit_work(visit, value);
  visit({"time_ns", "modelled"}, value.time_ns);
  visit_bound(visit, value);
}

template <class Visitor, Either<ReportWork> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("work",
               "What a complete step of a metered run does, and the time that a model gives it (docs/cost.md).");
  visit({"step", "the last complete one; 0: the program had no steps, and this is all that it did"}, value.step);
  visit_work(visit, value);
  visit({"flops_by_dtype", "the same by dtype"}, value.flops_by_dtype);
  visit({"not_metered", "calls that compute products of which there is no rule"}, value.not_metered);
  visit({"step_time_ns", "modelled; null where a rate of the device is not known"}, value.step_time_ns);
  visit({"step_time_low_ns", "eight of ten published steps lie above it"}, value.step_time_low_ns);
  visit({"step_time_high_ns", "… and below it"}, value.step_time_high_ns);
  visit({"host_time_ns", "modelled: that the host takes to submit the step; a step is not shorter"},
        value.host_time_ns);
  visit({"collectives", "calls of NCCL by this rank"}, value.collectives);
  visit({"link_bytes", "what they send to other ranks, as nccl-tests counts it for its bus bandwidth"},
        value.link_bytes);
  visit({"communication_time_ns", "modelled: of all collectives"}, value.communication_time_ns);
  visit({"exposed_communication_time_ns", "of them, what no computation hides: a part of the step's time"},
        value.exposed_communication_time_ns);
  visit_bound(visit, value);
  visit({"utilization_percent", "the FLOPs at the device's full rates, of the step time"}, value.utilization_percent);
  visit.or_null({"why_no_time", "why there is no step time"}, value.why_no_time);
  visit({"phases", "most time first"}, value.phases);
  visit({"modules", "most time first"}, value.modules);
}

template <class Visitor, Either<ReportRank> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("rank", "One process of a job of several.");
  visit({"rank", "null: a process beside the ranks"}, value.rank);
  visit({"pid", "of the process"}, value.pid);
  visit({"outcome", "as in the report of the process"}, value.outcome);
  visit({"device", "its main device"}, value.device);
  visit({"peak", "of that device"}, value.peak);
  visit({"failure", "of that device"}, value.failure);
  visit({"cause", "its kind only"}, value.cause);
  visit({"headroom_bytes", "of that device"}, value.headroom_bytes);
  visit({"folder", "of its own report, inside of the run folder"}, value.folder);
}

template <class Visitor, Either<ReportImbalance> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("imbalance", "The rank whose peak lies clearly above the median of the others.");
  visit({"rank", "that needs most"}, value.rank);
  visit({"peak_bytes", "of that rank"}, value.peak_bytes);
  visit({"median_of_others_bytes", "what the others need"}, value.median_of_others_bytes);
  visit({"difference_bytes", "how far it is above"}, value.difference_bytes);
}

template <class Visitor, Either<Report> Value>
void visit_fields(Visitor& visit, Value& value) {
  visit.object("report", "A report on one run.");
  visit.constant({"schema", "of this page"}, kReportSchema);
  visit({"outcome",
         "`caught`: the program went on after out-of-memory errors that it caught; `killed`: by a signal; `failed`: "
         "otherwise",
         {"ok", "out_of_memory", "caught", "killed", "failed"}},
        value.outcome);
  visit({"exit_code", "of the diagnosed program; null where nobody saw its end"}, value.exit_code);
  visit({"rank", "its place in a job; 0 outside of jobs"}, value.rank);
  visit({"world_size", "ranks of the job; 1 outside of jobs"}, value.world_size);
  visit({"steps", "steps that were begun"}, value.steps);
  visit({"steady_steps", "of those: repeated an earlier step to the last allocation, so that its ops were not watched"},
        value.steady_steps);
  visit({"still_runs", "the program ran on when it was looked at: the report says what happened so far"},
        value.still_runs);
  visit({"lower_bound", "sizes depended on values that a virtual device does not compute: peaks are at least these"},
        value.lower_bound);
  visit({"unwatched", "the allocator reported none of its blocks: at best its totals are known"}, value.unwatched);
  visit({"main_device", "position in `devices` of the one that failed, else of the fullest"}, value.main_device);
  visit({"devices", "those that were used, by index"}, value.devices);
  visit.or_null({"torch", "version of its torch"}, value.torch);
  visit.or_null({"command", "its command line"}, value.command);
  visit({"ranks", "the processes of a job of several; else empty"}, value.ranks);
  visit({"imbalance", "a rank that needs clearly more than the others"}, value.imbalance);
  visit({"limitations", "sentences: what this report does not know"}, value.limitations);
  visit({"notes", "what the recorder and the virtual device had to say"}, value.notes);
  visit({"work", "what a complete step does, of a run with `--meter`"}, value.work);
  visit({"case", "of a reference model: what its run shows"}, value.reference_case);
}

}  // namespace oomdiag
