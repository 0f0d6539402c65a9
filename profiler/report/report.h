#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/facts.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/owners.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/reason.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/history.h"

// The report: one value, whatever it is turned into. Names and meanings are those of its JSON, oomdiag-report/1, and
// each field is declared here once (profiler/field.h), or in profiler/explain where that makes its value. Bytes are integers, times nanoseconds; an empty string is null in JSON.
namespace oomdiag {

inline constexpr const char* kReportSchema = "oomdiag-report/1";

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

// What the replay makes, as the report has it.

void visit_fields(auto& visit, Either<NonPytorchOwner> auto& value) {
  visit.object("non_pytorch_owner", "Somebody who holds memory that PyTorch's allocator does not count.");
  visit({"owner", "a shared object, `context`, `modules`, `process <pid> <name>` or `unexplained`"}, value.owner);
  visit.or_null(
      {"kind", "how it was asked for", {"device", "handle", "pool", "array", "managed", "pinned", "process", "system"}},
      value.kind);
  visit({"bytes", "held", {}, kMayBeNegative}, value.bytes);
}

void visit_fields(auto& visit, Either<PinnedHostMemory> auto& value) {
  visit.object("pinned_host_memory",
               "Pinned host memory by the place that asked for it; null where that is not known.");
  visit({"owner", "the library that asked the driver"}, value.owner);
  visit_place(visit, value);
  visit({"bytes", "held"}, value.bytes);
  visit({"blocks", "how many"}, value.blocks);
}

void visit_fields(auto& visit, Either<InitializationStep> auto& value) {
  visit.object("initialization_step", "Free memory that went when something was initialised.");
  visit({"step", "`cuInit`, `context`, `modules of …`"}, value.name);
  visit({"bytes", "that free memory went down by", {}, kMayBeNegative}, value.bytes);
}

void visit_fields(auto& visit, Either<PhasePeak> auto& value) {
  visit.object("phase_of_step", "The peak of a phase of a step.");
  visit({"step", "which"}, value.step);
  visit({"phase", "which"}, value.phase);
  visit({"peak_allocated_bytes", "in it"}, value.allocated_bytes);
}

void visit_fields(auto& visit, Either<Mark> auto& value) {
  visit.object("mark", "A place in the run that the program named by `oomdiag.mark`.");
  visit({"name", "that the program gave"}, value.name);
  visit({"time_ns", "by the clock of `timeline`"}, value.time_ns);
  visit({"step", "in which"}, value.step);
  visit({"allocated_bytes", "then"}, value.allocated_bytes);
  visit({"reserved_bytes", "then"}, value.reserved_bytes);
  visit({"peak_allocated_bytes", "since the mark before"}, value.peak_allocated_bytes);
}

void visit_fields(auto& visit, Either<AutocastUse> auto& value) {
  visit.object("autocast", "What autocast takes at that moment.");
  visit({"dtype", "that autocast casts to", {"float16", "bfloat16"}}, value.dtype);
  visit({"made_bytes", "alive, and made by forward ops under autocast"}, value.made_bytes);
  visit({"cache_bytes", "of these: casts of weights, kept until the region ends"}, value.cache_bytes);
  visit({"repeated_bytes", "casts of weights that were cast before"}, value.repeated_bytes);
  visit({"repeated_count", "how many these are"}, value.repeated_count);
  visit({"region_open", "that moment lies inside of the region"}, value.region_open);
}

void visit_fields(auto& visit, Either<RecorderNote> auto& value) {
  visit.object("note", "What the recorder or the virtual device had to say, word for word.");
  visit({"kind", "`estimate`, `unsupported`, `snapshot`, …"}, value.kind);
  visit({"text", "which function or area"}, value.text);
}

struct ReportDevice {
  int index = 0;
  std::string name;
  bool virtual_device = false;
  int64_t total_bytes = 0;
  std::string compute_capability;
  std::optional<int64_t> allowed_bytes{};

  double memory_fraction() const {
    return allowed_bytes && total_bytes > 0 ? static_cast<double>(*allowed_bytes) / static_cast<double>(total_bytes)
                                            : 1;
  }
  bool operator==(const ReportDevice&) const = default;
};

void visit_fields(auto& visit, Either<ReportDevice> auto& value) {
  visit.object("device", "A GPU.");
  visit({"index", "as the program counts"}, value.index);
  visit({"name", "as the runtime reports it"}, value.name);
  visit({"virtual", "it was not there: a virtual device"}, value.virtual_device);
  visit({"total_bytes", "as the runtime reports them"}, value.total_bytes);
  visit({"compute_capability", "\"8.9\""}, value.compute_capability);
  visit({"allowed_bytes", "that PyTorch may reserve, where its settings have a `per_process_memory_fraction`"},
        value.allowed_bytes);
}

struct ReportPeak {
  int64_t allocated_bytes = 0, reserved_bytes = 0;
  Phase phase = Phase::setup;
  uint32_t step = 0;
  std::string node{}, op{}, module{}, source{};
  std::string inner_source{};
  std::string autocast{};
  int64_t host_memory_bytes = 0;
  int64_t cached_for_streams_bytes = 0;
  uint32_t streams = 0;

  bool operator==(const ReportPeak&) const = default;
};

void visit_fields(auto& visit, Either<ReportPeak> auto& value) {
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
  visit({"cached_for_streams_bytes",
         "at the end cached for other streams than the one that has most, each of which serves its own only"},
        value.cached_for_streams_bytes);
  visit({"streams", "how many these streams are"}, value.streams);
}

/// A failed allocation, and the state then.
struct ReportFailure {
  Phase phase = Phase::other;
  uint32_t step = 0;
  std::string node{}, op{}, module{}, source{};
  std::string inner_source{};
  std::string inner_op{};
  int64_t requested_bytes = 0, allocated_bytes = 0, reserved_bytes = 0, free_bytes = 0;
  int64_t time_ns = 0;
  std::string requested_for{};
  std::vector<std::string> stack{};
  std::vector<std::string> native_stack{};
  std::string autocast{};
  std::string parameter_group{};

  bool operator==(const ReportFailure&) const = default;
};

void visit_fields(auto& visit, Either<ReportFailure> auto& value) {
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
  visit({"stack", "calls that led to `source`, \"train.py:31 in forward\", innermost first"}, value.stack);
  visit({"native_stack", "C++ calls, \"train+0x4f1a in step(long)\", where they were asked for"}, value.native_stack);
  visit.or_null({"autocast", "dtype of the autocast region around the op"}, value.autocast);
  visit.or_null({"parameter_group", "that an optimizer's step was at, of several"}, value.parameter_group);
}

/// Somebody who holds bytes.
struct ReportOwner {
  Category category = Category::unknown;
  int64_t bytes = 0;
  std::string name{};
  std::string shape{};
  std::vector<std::string> used_by{};
  std::string autocast{};
  std::string parameter_group{};

  bool operator==(const ReportOwner&) const = default;
};

void visit_fields(auto& visit, Either<ReportOwner> auto& value) {
  visit.object("allocation", "A block in use.");
  visit({"category", "of the block"}, value.category);
  visit({"bytes", "of the block"}, value.bytes);
  visit.or_null({"name", "where it is made: a module, else an op, else a line"}, value.name);
  visit.or_null({"shape", "shape and dtype"}, value.shape);
  visit({"used_by", "modules whose backward keeps it"}, value.used_by);
  visit.or_null({"autocast", "dtype of the autocast region that it was made in"}, value.autocast);
  visit.or_null({"parameter_group", "of an optimizer with several: \"AdamW, group 1\""}, value.parameter_group);
}

/// What the stacks of a snapshot say of a category: so many bytes with this confidence.
struct ReportFromStacks {
  Category category = Category::unknown;
  std::string confidence{};
  int64_t bytes = 0;

  bool operator==(const ReportFromStacks&) const = default;
};

void visit_fields(auto& visit, Either<ReportFromStacks> auto& value) {
  visit.object("from_stacks", "What the stacks of a memory snapshot say of a category.");
  visit({"category", "of the blocks"}, value.category);
  visit({"confidence", "of the rule that named it", {"high", "medium", "low"}}, value.confidence);
  visit({"bytes", "allocated, at that moment"}, value.bytes);
}

/// Those who hold bytes and are alike, as the same tensor of each layer: folded, "transformer.h.*.mlp.act".
struct ReportHolder {
  Category category = Category::unknown;
  std::string name{};
  std::string kind{};
  std::string op{}, source{}, shape{}, used_by{};
  std::string referrer{};
  int64_t bytes = 0, blocks = 0;
  int64_t copies = 1;
  int64_t block_bytes = 0;

  bool operator==(const ReportHolder&) const = default;
};

void visit_fields(auto& visit, Either<ReportHolder> auto& value) {
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

struct ReportBlockedSegment {
  int64_t bytes = 0, largest_free_block_bytes = 0, used_bytes = 0;
  std::vector<ReportOwner> blocked_by{};

  bool operator==(const ReportBlockedSegment&) const = default;
};

void visit_fields(auto& visit, Either<ReportBlockedSegment> auto& value) {
  visit.object("blocked_segment", "A segment whose blocks in use keep its free blocks from serving the request.");
  visit({"bytes", "of the segment"}, value.bytes);
  visit({"largest_free_block_bytes", "in it"}, value.largest_free_block_bytes);
  visit({"used_bytes", "of its blocks in use"}, value.used_bytes);
  visit({"blocked_by", "the largest of them"}, value.blocked_by);
}

struct ReportCause {
  CauseKind kind = CauseKind::capacity;
  std::string because{};
  int64_t short_by_bytes = 0;
  FailureFacts evidence{};
  std::vector<ReportBlockedSegment> blocked_segments{};
  std::vector<NonPytorchOwner> non_pytorch{};

  bool operator==(const ReportCause&) const = default;
};

void visit_fields(auto& visit, Either<ReportCause> auto& value) {
  visit.object("cause", "Why the request failed.");
  visit({"kind", "the one primary cause"}, value.kind);
  visit.or_null(
      {"because", "which of the reasons of that kind: a row of `kCauses` in profiler/explain/causes/causes.cpp"},
      value.because);
  visit({"short_by_bytes", "what is missing even if every cached byte could be used; 0: nothing is missing now"},
        value.short_by_bytes);
  visit({"evidence", "the facts that the choice rests on"}, value.evidence);
  visit({"blocked_segments", "where free and cached bytes would be enough: those with the largest free blocks"},
        value.blocked_segments);
  visit({"non_pytorch", "of non-PyTorch memory: who holds it"}, value.non_pytorch);
}

/// How the bytes of the GPU are spent at the described moment; adds up to the total.
struct ReportMemory {
  int64_t allocated_bytes = 0, pending_free_bytes = 0, cached_bytes = 0, non_pytorch_bytes = 0, free_bytes = 0;

  bool operator==(const ReportMemory&) const = default;
};

void visit_fields(auto& visit, Either<ReportMemory> auto& value) {
  visit.object("device_memory", "How the bytes of the device were spent at that moment; the five add up to its total.");
  visit({"allocated_bytes", "in blocks of tensors"}, value.allocated_bytes);
  visit({"pending_free_bytes", "freed, but still in use on another stream"}, value.pending_free_bytes);
  visit({"cached_bytes", "reserved, not allocated"}, value.cached_bytes);
  visit({"non_pytorch_bytes", "what PyTorch does not count"}, value.non_pytorch_bytes);
  visit({"free_bytes", "the rest"}, value.free_bytes);
}

struct ReportSavedTensor {
  int64_t bytes = 0;
  std::vector<int64_t> shape{};
  std::string dtype{}, made_by{}, module{}, source{};
  std::vector<std::string> saved_by{}, saved_by_modules{};

  bool operator==(const ReportSavedTensor&) const = default;
};

void visit_fields(auto& visit, Either<ReportSavedTensor> auto& value) {
  visit.object("saved_tensor", "A tensor that autograd keeps for backward.");
  visit({"bytes", "of its storage"}, value.bytes);
  visit({"shape", "its sizes"}, value.shape);
  visit.or_null({"dtype", "`float32`"}, value.dtype);
  visit.or_null({"made_by", "the op that made it"}, value.made_by);
  visit_place(visit, value);
  visit({"saved_by", "the nodes that keep it"}, value.saved_by);
  visit({"saved_by_modules", "their modules"}, value.saved_by_modules);
}

/// A place that keeps more with each step.
struct ReportGrowingPlace {
  std::string op{}, module{}, source{};
  int64_t bytes_per_step = 0, live_bytes = 0, blocks = 0;

  bool operator==(const ReportGrowingPlace&) const = default;
};

void visit_fields(auto& visit, Either<ReportGrowingPlace> auto& value) {
  visit.object("growing_place", "A place that keeps more with each step.");
  visit_place(visit, value);
  visit({"bytes_per_step", "that it adds", {}, kMayBeNegative}, value.bytes_per_step);
  visit({"live_bytes", "at the end"}, value.live_bytes);
  visit({"blocks", "at the end"}, value.blocks);
}

/// Growth from step to step that has one reason.
struct ReportGrowth {
  GrowthKind kind = GrowthKind::kept_tensors;
  int64_t bytes_per_step = 0, grown_bytes = 0;
  uint32_t first_step = 0, last_step = 0;
  std::string op{}, module{}, source{};
  std::string referrer{};
  int64_t place_count = 0;
  std::vector<ReportGrowingPlace> places{};

  bool operator==(const ReportGrowth&) const = default;
};

void visit_fields(auto& visit, Either<ReportGrowth> auto& value) {
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

/// The life of the largest block in use.
struct ReportLifetime {
  Category category = Category::unknown;
  std::string name{}, shape{};
  int64_t bytes = 0;
  Phase made_in = Phase::setup;
  uint32_t made_in_step = 0;
  std::string op{}, module{}, source{};
  Keeper kept_by = Keeper::program;
  std::string freed_by_node{}, freed_by_module{};

  bool operator==(const ReportLifetime&) const = default;
};

void visit_fields(auto& visit, Either<ReportLifetime> auto& value) {
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

struct ReportPoint {
  int64_t time_ns = 0, allocated_bytes = 0, reserved_bytes = 0;

  bool operator==(const ReportPoint&) const = default;
};

void visit_fields(auto& visit, Either<ReportPoint> auto& value) {
  visit.object("point", "The state at one time of the run.");
  visit({"time_ns", "since recording began"}, value.time_ns);
  visit({"allocated_bytes", "then"}, value.allocated_bytes);
  visit({"reserved_bytes", "then"}, value.reserved_bytes);
}

/// OOMs that a library caught inside of an op, to go on with a slower plan.
struct ReportRecovered {
  std::string op;
  int64_t requested_bytes = 0, count = 0;
  int64_t granted_bytes = 0;
  std::string node{};

  bool operator==(const ReportRecovered&) const = default;
};

void visit_fields(auto& visit, Either<ReportRecovered> auto& value) {
  visit.object("recovered_by_library",
               "Requests whose failure a library caught inside of an op, to go on with a slower plan.");
  visit.or_null({"op", "inside of which"}, value.op);
  visit({"requested_bytes", "of each"}, value.requested_bytes);
  visit({"count", "how often"}, value.count);
  visit({"granted_bytes", "the workspace that the op went on with; 0: a plan without one"}, value.granted_bytes);
  visit.or_null({"node", "autograd node, in backward"}, value.node);
}

/// What the parameters of one group of an optimizer take; without a name: what is in no group that is known.
struct ReportParameterGroup {
  std::string name{};
  int64_t parameter_bytes = 0, gradient_bytes = 0, optimizer_state_bytes = 0;

  bool operator==(const ReportParameterGroup&) const = default;
};

void visit_fields(auto& visit, Either<ReportParameterGroup> auto& value) {
  visit.object("parameter_group",
               "What a parameter group of an optimizer takes; the groups add up to the three categories.");
  visit.or_null({"name", "\"AdamW, group 1\"; null, the last: what is in no group that is known"}, value.name);
  visit({"parameter_bytes", "of the group"}, value.parameter_bytes);
  visit({"gradient_bytes", "of the group"}, value.gradient_bytes);
  visit({"optimizer_state_bytes", "of the group"}, value.optimizer_state_bytes);
}

/// All that is said about one GPU.
struct ReportOfDevice {
  ReportDevice device{};
  ReportPeak peak{};
  std::optional<ReportFailure> failure{};
  std::optional<ReportCause> cause{};
  Figures categories{};
  std::vector<ReportFromStacks>
      from_stacks{};  ///< how far the categories of a snapshot can be trusted; adds up to them
  ReportMemory memory{};
  Figures private_pools{};
  std::vector<NonPytorchOwner> non_pytorch{};
  std::vector<NonPytorchOwner> host_memory{};
  std::vector<PinnedHostMemory> pinned_host_memory{};
  std::vector<InitializationStep> initialization_steps{};
  std::vector<NonPytorchOwner> failed_driver_requests{};
  Figures packing{};
  Figures attribution{};
  int64_t headroom_bytes = 0;
  int64_t required_bytes = 0;
  int64_t replay_error_bytes = 0;
  std::vector<ReportGrowth> growth{};
  std::optional<uint32_t> out_of_memory_near_step{};
  Owners allocated_by{};
  std::optional<ReportLifetime> largest_allocation{};
  Figures phase_peaks{};
  std::vector<ReportOwner> allocations{};
  std::vector<ReportHolder> top_allocations{};
  std::optional<AutocastUse> autocast{};
  std::vector<ReportParameterGroup> parameter_groups{};
  std::vector<ReportSavedTensor> saved_tensors{};
  std::optional<BatchModel> batch{};
  std::optional<Reason> reason{};
  std::vector<Fix> fixes{};
  std::optional<Advice> besides{};
  std::vector<PhasePeak> phases{};
  std::vector<ReportPoint> timeline{};
  std::vector<ReportRecovered> recovered_by_library{};
  std::vector<ReportFailure> caught{};
  int64_t caught_count = 0;
  bool caught_at_least = false;
  std::vector<Mark> marks{};

  bool operator==(const ReportOfDevice&) const = default;
};

void visit_fields(auto& visit, Either<ReportOfDevice> auto& value) {
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
  visit({"pinned_host_memory", "by the 8 places that asked for most; PyTorch keeps such blocks for the next request"},
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
  visit({"required_bytes",
         "the smallest device on which that moment could pass: what it needs allocated, and what is not PyTorch's"},
        value.required_bytes);
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

/// One process of a job of several.
struct ReportRank {
  std::optional<int> rank{};
  int pid = 0;
  std::string outcome{};
  ReportDevice device{};
  ReportPeak peak{};
  std::optional<ReportFailure> failure{};
  std::optional<CauseKind> cause{};
  int64_t headroom_bytes = 0;
  std::string folder{};  ///< of its own report, inside of the run folder

  bool operator==(const ReportRank&) const = default;
};

void visit_fields(auto& visit, Either<ReportRank> auto& value) {
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

/// A rank that needs clearly more than the others.
struct ReportImbalance {
  int rank = 0;
  int64_t peak_bytes = 0, median_of_others_bytes = 0, difference_bytes = 0;

  bool operator==(const ReportImbalance&) const = default;
};

void visit_fields(auto& visit, Either<ReportImbalance> auto& value) {
  visit.object("imbalance", "The rank whose peak lies clearly above the median of the others.");
  visit({"rank", "that needs most"}, value.rank);
  visit({"peak_bytes", "of that rank"}, value.peak_bytes);
  visit({"median_of_others_bytes", "what the others need"}, value.median_of_others_bytes);
  visit({"difference_bytes", "how far it is above"}, value.difference_bytes);
}

/// What a run of a reference model shows about its case. The member of a report is not called `case`, its JSON name is.
struct ReportCase {
  std::string id;
  std::string about;
  std::vector<std::string> notes{};
  Figures figures{};

  bool operator==(const ReportCase&) const = default;
};

void visit_fields(auto& visit, Either<ReportCase> auto& value) {
  visit.object("case", "What a run of a reference model shows about its case.");
  visit({"id", "\"S10\""}, value.id);
  visit({"about", "\"training without zero_grad\""}, value.about);
  visit({"notes", "sentences, and tables whose lines begin with two spaces"}, value.notes);
  visit({"figures", "what they are made from"}, value.figures);
}

/// The work of a phase or a module in a step.
struct ReportWorkPart {
  std::string name{};
  int64_t flops = 0, memory_bytes = 0, bus_bytes = 0, launches = 0;
  std::optional<int64_t> time_ns{};
  std::string bound_by{};

  bool operator==(const ReportWorkPart&) const = default;
};

void visit_fields(auto& visit, Either<ReportWorkPart> auto& value) {
  visit.object("work_part", "The work of a phase or a module in a step; the fields are those of `work`.");
  visit(
      {"name", "of the phase, `recomputation` being what checkpoints run again in backward, or the path of the module"},
      value.name);
  visit_work(visit, value);
  visit({"time_ns", "modelled"}, value.time_ns);
  visit_bound(visit, value);
}

/// What a complete step of a metered run does, and how long a model says that it takes on this device.
struct ReportWork {
  uint32_t step = 0;
  int64_t flops = 0;
  Figures flops_by_dtype{};
  int64_t memory_bytes = 0, bus_bytes = 0, launches = 0;
  int64_t not_metered = 0;
  std::optional<int64_t> step_time_ns{};
  std::optional<int64_t> step_time_low_ns{}, step_time_high_ns{};
  std::optional<int64_t> host_time_ns{};
  int64_t collectives = 0, link_bytes = 0;
  std::optional<int64_t> communication_time_ns{};
  std::optional<int64_t> exposed_communication_time_ns{};
  std::string bound_by{};
  std::optional<int64_t> utilization_percent{};
  std::string why_no_time{};
  std::vector<ReportWorkPart> phases{}, modules{};

  bool operator==(const ReportWork&) const = default;
};

void visit_fields(auto& visit, Either<ReportWork> auto& value) {
  visit.object("work",
               "What a complete step of a metered run does, and the time that a model gives it (docs/cost.md).");
  visit({"step", "the last complete one that is like most; 0: the program had no steps, and this is all that it did"},
        value.step);
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

struct Report {
  std::string outcome = "ok";
  std::optional<int> exit_code{};
  std::string torch{};
  std::string command{};
  std::string folder{};   ///< where it is kept, for the next command to type; not in the JSON
  bool snapshot = false;  ///< of a memory snapshot: no phases, no steps; not in the JSON
  int rank = 0, world_size = 1;
  uint32_t steps = 0;
  uint32_t steady_steps = 0;
  bool still_runs = false;
  bool lower_bound = false;
  bool unwatched = false;
  std::vector<ReportOfDevice> devices{};
  size_t main_device = 0;
  std::vector<ReportRank> ranks{};
  std::optional<ReportImbalance> imbalance{};
  std::vector<std::string> limitations{};
  std::vector<RecorderNote> notes{};
  std::optional<ReportCase> reference_case{};
  std::optional<ReportWork> work{};

  bool operator==(const Report&) const = default;
};

void visit_fields(auto& visit, Either<Report> auto& value) {
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

/// What the first screen says besides its reason, or null.
inline const Reason* second_reason_of(const ReportOfDevice& device) {
  const bool is_another = device.besides && device.reason && device.besides->reason != *device.reason;
  return is_another ? &device.besides->reason : nullptr;
}

/// Whether the first screen has a line of the weights that autocast has cast.
inline bool keeps_casts(const ReportOfDevice& device) { return device.autocast && device.autocast->cache_bytes > 0; }

/// What a GPU's growing places take together in each step.
inline int64_t growth_of(const ReportOfDevice& device) {
  int64_t bytes = 0;
  for (const ReportGrowth& growth : device.growth) bytes += growth.bytes_per_step;
  return bytes;
}

/// What PyTorch may take of the GPU.
inline int64_t available_bytes(const ReportOfDevice& device) {
  const int64_t total = device.device.total_bytes;
  return std::min(total - device.memory.non_pytorch_bytes, device.device.allowed_bytes.value_or(total));
}

/// The device that the report is about: the one that failed, else the fullest; nullptr where none was used.
inline const ReportOfDevice* main_device_of(const Report& report) {
  return report.main_device < report.devices.size() ? &report.devices[report.main_device] : nullptr;
}
inline ReportOfDevice* main_device_of(Report& report) {
  return report.main_device < report.devices.size() ? &report.devices[report.main_device] : nullptr;
}

}  // namespace oomdiag
