#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/shared_list.h"

// What a trace shows once it is replayed. Plain values; names are views into the trace they were made from, which must
// outlive them.
namespace oomdiag {

/// What the program was doing when it allocated.
enum class Phase : uint8_t { setup, forward, backward, optimizer, other };
inline constexpr size_t kPhaseCount = 5;

/// What a live block holds; design §5.
enum class Category : uint8_t {
  parameter,
  buffer,
  gradient,
  optimizer_state,
  activation,
  input,
  output,
  activation_gradient,
  temporary,
  workspace,
  unknown
};
inline constexpr size_t kCategoryCount = 11;

/// How tensors of a category behave in a program that trains.
struct CategoryTraits {
  bool of_model = false;       ///< weights, and what each of them has: the batch does not change it
  bool follows_batch = false;  ///< of a workspace the op decides
  bool is_made_once = false;   ///< in one step, for all that follow
  bool stays = false;          ///< the rest of a step frees none of it
};
inline constexpr std::array<CategoryTraits, kCategoryCount> kCategoryTraits = {{
    {.of_model = true, .is_made_once = true, .stays = true},  // parameter
    {.of_model = true, .is_made_once = true, .stays = true},  // buffer
    {.of_model = true},                                       // gradient
    {.of_model = true, .is_made_once = true, .stays = true},  // optimizer_state
    {.follows_batch = true},                                  // activation
    {.follows_batch = true, .stays = true},                   // input
    {.follows_batch = true},                                  // output
    {.follows_batch = true},                                  // activation_gradient
    {.follows_batch = true},                                  // temporary
    {.is_made_once = true},                                   // workspace
    {.is_made_once = true, .stays = true},                    // unknown
}};
constexpr const CategoryTraits& traits_of(Category category) { return kCategoryTraits[static_cast<size_t>(category)]; }

/// How far a category can be trusted that was read off the stacks of a snapshot; none: of a recording, or not known.
enum class Confidence : uint8_t { none, low, medium, high };

std::string_view name_of(Phase phase);
std::string_view name_of(Category category);
std::string_view name_of(Confidence confidence);
std::string_view name_of(DriverMemory memory);

/// A place in the program. In backward `op`, `module` and `source` are those of the forward op that made the node.
struct Where {
  std::string_view node{}, op{}, inner{}, module{}, source{};
  std::string_view inner_source{};  ///< of a package inside of `source`, "transformers/…/modeling_llama.py:164"
  std::string_view autocast{};      ///< "bfloat16": the op (in backward the forward op) ran under autocast, or empty

  bool operator==(const Where&) const = default;
};

/// A block that was in use at the described moment.
struct LiveBlock {
  uint64_t address = 0;
  int64_t bytes = 0;  ///< of the block, rounded
  int64_t requested_bytes = 0;
  Category category = Category::unknown;
  Confidence confidence = Confidence::none;
  Phase phase = Phase::other;
  uint32_t step = 0;              ///< in which it was allocated; 0 before the first one, and where it is not known
  bool pending_free = false;      ///< freed, but another stream still uses it; no category
  bool before_recording = false;  ///< allocated before recording began: by whom is not known
  bool let_go = false;            ///< freed after the failure, before the program's variables were looked through
  uint64_t born = 0, freed = 0;   ///< events; freed: 0 unless it was let go
  Where made{};
  std::string_view name{};    ///< of a parameter or buffer
  std::string_view shape{};   ///< "[64, 32] float32", or empty
  std::string_view group{};   ///< of the optimizer's parameter groups, "AdamW, group 1", or empty
  bool trained = false;       ///< a parameter of an optimizer that wants a gradient
  bool uncalled = false;      ///< a parameter of a layer that was never called, nor given to an optimizer
  bool backward_ran = false;  ///< backward has gone through the nodes that keep it, and they keep it still
  uint32_t context = 0;       ///< of the trace, that allocated it; 0: not known
  SharedList<Where>
      saved_by{};  ///< the autograd nodes that keep it for backward, in forward's order: the first one frees it

  bool operator==(const LiveBlock&) const = default;
};

/// A segment at the described moment.
struct SegmentLayout {
  uint64_t address = 0;
  uint64_t stream = 0;
  int64_t bytes = 0;
  int64_t used_bytes = 0;  ///< of blocks that are allocated or pending free
  int64_t largest_free_block_bytes = 0;
  int64_t holes = 0;
  uint8_t pool = 0;  ///< 0, or a private one (MemPool, CUDA graph), whose cached bytes serve nobody else
  bool small = false;
  bool expandable = false;
  std::vector<uint64_t> blocked_by{};  ///< addresses of its blocks in use, largest first, at most 3

  bool operator==(const SegmentLayout&) const = default;
};

/// Somebody who holds memory that PyTorch's allocator does not count.
struct NonPytorchOwner {
  std::string owner;  ///< "libnccl.so.2", "context", "modules", "process 4711 python", "unexplained"
  std::string
      kind{};  ///< "device", "handle", "pool", "array", "managed", "pinned", "process", "system"; empty: unexplained
  int64_t bytes = 0;

  bool operator==(const NonPytorchOwner&) const = default;
};

/// Pinned host memory that was requested at one place. PyTorch's own cache of it keeps a block for good once it
/// is there, for whoever asks next: the place is that of the first.
struct PinnedHostMemory {
  std::string owner;                     ///< the library that asked the driver
  std::string op{}, module{}, source{};  ///< empty where none is known
  std::string inner_source{};            ///< line of a package inside of `source`, or empty
  int64_t bytes = 0, blocks = 0;

  bool operator==(const PinnedHostMemory&) const = default;
};

/// Free memory that went when something was initialised: "cuInit", "context", "modules of libcublas.so.13".
struct InitializationStep {
  std::string name{};
  int64_t bytes = 0;

  bool operator==(const InitializationStep&) const = default;
};

/// The state of one GPU at the moment that a report describes: the failing allocation, else the peak.
struct MemoryState {
  uint64_t event = 0;  ///< index into the trace's events
  int64_t time_ns = 0;
  uint32_t step = 0;
  Phase phase = Phase::setup;
  Where where{};  ///< of the allocation that failed, or that made the peak
  int64_t allocated_bytes = 0, pending_free_bytes = 0, reserved_bytes = 0;
  int64_t non_pytorch_bytes =
      0;  ///< taken on the GPU by others than PyTorch's allocator: context, libraries, other processes
  int64_t free_bytes = 0;
  std::vector<NonPytorchOwner>
      non_pytorch{};  ///< of non_pytorch_bytes, the last is "unexplained", which may be negative
  std::vector<NonPytorchOwner> host_memory{};          ///< pinned and managed, by whom
  std::vector<PinnedHostMemory> pinned_host_memory{};  ///< the former by place, largest first
  bool saved_from_earlier_step = false;  ///< what autograd keeps is taken from an earlier step like this one
  std::vector<LiveBlock> blocks{};
  std::vector<SegmentLayout> segments{};

  bool operator==(const MemoryState&) const = default;
};

struct Peak {
  int64_t allocated_bytes = 0;
  int64_t reserved_bytes = 0;  ///< the most ever reserved, perhaps at another moment
  uint64_t event = 0;          ///< that reached allocated_bytes
  uint32_t step = 0;
  Phase phase = Phase::setup;
  bool at_start = false;  ///< it was reached before the first event

  bool operator==(const Peak&) const = default;
};

/// What the allocator has cached for other streams than the one that has most, at the end of the recording: each serves its own only.
struct CachedForStreams {
  int64_t bytes = 0;
  uint32_t streams = 0;

  bool operator==(const CachedForStreams&) const = default;
};

struct PhasePeak {
  uint32_t step = 0;
  Phase phase = Phase::setup;
  int64_t allocated_bytes = 0;

  bool operator==(const PhasePeak&) const = default;
};

/// What refers to a tensor as the interpreter ends.
struct Referrer {
  std::string_view variable{};  ///< "list 'history' in train.py"
  Where made{};                 ///< the tensor
  int64_t nodes = 0;  ///< of autograd, that it keeps and no referrer before it; of a graph's tensor at least one
  int64_t bytes = 0;  ///< of the tensor, which may be a view
  int64_t storage_bytes = 0;    ///< that it keeps, as requested
  bool wants_gradient = false;  ///< requires_grad_() was called for it, and it is no parameter
  bool of_newest_steps =
      false;  ///< `nodes` are all of the step that runs and the one before; false also where that is not known
  uint32_t context = 0;  ///< as of a LiveBlock
  uint64_t born = 0;     ///< as of the LiveBlock that is its storage; 0: on the host

  /// Of `nodes` those that may be of earlier steps.
  int64_t earlier_nodes() const { return of_newest_steps ? 0 : nodes; }

  /// A part of its storage, which stays as a whole.
  bool is_small_view() const { return bytes * 2 <= storage_bytes; }

  /// One number, as a loss.
  bool is_scalar() const { return bytes <= 8; }

  bool operator==(const Referrer&) const = default;
};

/// Data of which more than half is what fills sequences up to one length.
struct PaddedData {
  std::string_view variable{};  ///< "variable 'ids' in main (train.py:17)"
  std::string_view shape{};     ///< "[8, 512] int64"
  int64_t longest = 0;          ///< of its sequences, without padding
  int64_t per_mille = 0;        ///< of it that is no padding

  bool operator==(const PaddedData&) const = default;
};

/// The state of a GPU where a step ends.
struct StepEnd {
  uint32_t step = 0;
  int64_t allocated_bytes = 0;

  bool operator==(const StepEnd&) const = default;
};

struct TimelinePoint {
  uint64_t event = 0;
  int64_t time_ns = 0, allocated_bytes = 0, reserved_bytes = 0;

  bool operator==(const TimelinePoint&) const = default;
};

/// What of one place of the program (a context of the trace) lives at the ends of steps.
struct PlaceCurve {
  Where where{};                  ///< of its newest allocation: one context may be several nodes of a backward pass
  uint32_t context = 0;           ///< of the trace; 0: not known
  bool in_graph = false;          ///< a forward op that autograd recorded
  bool differentiated = false;    ///< an op of a backward node that autograd recorded: create_graph, or one run again
  uint64_t newest = 0;            ///< sequence of its newest allocation: orders places as the program runs them
  std::vector<int64_t> bytes{};   ///< requested, by StepCurves::steps
  std::vector<int64_t> blocks{};  ///< how many
  /// The same by StepCurves::run_steps. Before the oldest event kept they are known by what still lives; where anything
  /// else may have lived, by the first of `bytes`.
  std::vector<int64_t> run_bytes{}, run_blocks{};

  bool operator==(const PlaceCurve&) const = default;
};

/// The places of which more lives at the end than at some step before.
struct StepCurves {
  std::vector<uint32_t> steps{};  ///< at whose ends the curves were read; of long runs evenly spread ones
  std::vector<double>
      workload{};  ///< how much larger requests were than in the first of `steps`: the median of all places
  std::vector<uint32_t> run_steps{};  ///< from the first step of the run to the last of `steps`, where events of the
                                      ///< first ones were overwritten; else empty
  std::vector<PlaceCurve> places{};

  bool operator==(const StepCurves&) const = default;
};

/// A place in the run that the program itself named.
struct Mark {
  std::string name{};
  int64_t time_ns = 0;
  uint32_t step = 0;
  int64_t allocated_bytes = 0, reserved_bytes = 0;
  int64_t peak_allocated_bytes = 0;  ///< since the mark before

  bool operator==(const Mark&) const = default;
};

/// Requested bytes allocated in backward, and how many of them could be joined.
struct Attribution {
  int64_t backward_bytes = 0;
  int64_t with_node_bytes = 0;        ///< the autograd node is known
  int64_t with_forward_op_bytes = 0;  ///< … and the forward op that made it
  int64_t with_module_bytes = 0;      ///< … and the module or user scope in which that op ran
  int64_t with_source_bytes = 0;      ///< … and its line
  int64_t accumulate_bytes = 0;       ///< by AccumulateGrad, which has no forward op

  bool operator==(const Attribution&) const = default;
};

/// How an OOM ended: a library took another way (cuDNN), the program caught it and went on, or it ended the program.
enum class Outcome : uint8_t { recovered, caught, fatal };

/// An out-of-memory error of the allocator, and the state it happened in.
struct OutOfMemory {
  uint64_t event = 0;  ///< its out_of_memory event
  uint64_t end = 0;    ///< the last event that describes it
  uint8_t device = 0;
  Outcome outcome = Outcome::fatal;
  uint32_t step = 0;
  Phase phase = Phase::other;
  Where where{};
  int64_t requested_bytes = 0;  ///< rounded to a block
  uint8_t pool = 0;             ///< that was asked
  int64_t allocated_bytes = 0, reserved_bytes = 0, free_bytes = 0;
  int64_t granted_bytes = 0;  ///< where the library recovered: the workspace that the op took in its place, 0 = none
  bool first_in_op = true;    ///< the op had allocated nothing before
  std::string_view requested_shape{};  ///< of the gradient that the node was making, or empty
  Where requested_gradient_of{};       ///< the forward op whose output's gradient it was
  std::string_view stack{};            ///< calls that led to the line of `where`, one per line of text, innermost first
  bool no_grad = false;                ///< its op, of no node, ran without gradients; false where that is not known
  bool modules_evaluate = false;       ///< modules ran, all of them in evaluation mode
  bool copies_deeply = false;          ///< copy.deepcopy() runs, called by the line of `stack`
  bool names_backward = false;         ///< a function of the user's that ran has the word backward in it
  bool asks_for_checkpoints = false;   ///< an attribute of a module that ran says that activations are checkpointed
  std::string_view first_stack{};      ///< calls by which the line of `where` was first reached, or empty
  std::string_view native_stack{};     ///< C++ calls of the OOM, where they were asked for
  std::string_view group{};            ///< the parameter group that an optimizer's step was at, or empty

  bool operator==(const OutOfMemory&) const = default;
};

/// A block that was in use at some time of a step. Times are positions: the n-th allocation or free of the step, from 1.
struct StepAllocation {
  static constexpr uint32_t kBefore = 0;            ///< born before the step
  static constexpr uint32_t kNever = ~uint32_t{0};  ///< died: not in this step

  int64_t bytes = 0;            ///< of the block, rounded
  int64_t requested_bytes = 0;  ///< of it
  uint32_t born = kBefore, died = kNever;
  Category category = Category::unknown;
  Phase phase = Phase::other;        ///< in which it was allocated
  bool in_graph = false;             ///< made by a forward op that autograd recorded
  bool freed_in_backward = false;    ///< by an autograd node
  bool freed_by_accumulate = false;  ///< by AccumulateGrad: it was added to a gradient
  bool ever_saved = false;           ///< by a node, in this or an earlier step
  Where made{};
  std::string_view shape{};
  SharedList<Where> saved_by{};  ///< in forward's order

  bool is_of_step() const { return born != kBefore; }
  bool operator==(const StepAllocation&) const = default;
};

/// The step that holds the described moment, block by block; the failed request is the last of them.
struct StepAllocations {
  uint32_t step = 0;                     ///< 0: there is no step, and nothing else is set
  std::vector<StepAllocation> blocks{};  ///< by ascending birth
  std::vector<uint64_t> events{};        ///< index of the event at each position, which are counted from 1

  bool operator==(const StepAllocations&) const = default;
};

/// One GPU.
struct DeviceHistory {
  int index = 0;
  Peak peak;
  CachedForStreams cached_for_streams{};
  MemoryState state;
  std::vector<PhasePeak> phases{};  ///< by step; of long runs the first and the last steps, and the peak's
  std::array<int64_t, kPhaseCount> phase_peaks{};  ///< of all steps, by Phase
  std::vector<StepEnd> step_ends{};  ///< at most 2000: all steps that the trace still has, or every 2nd, 4th, …
  StepCurves curves{};
  std::vector<Referrer> referrers{};
  std::vector<PaddedData> padded{};      ///< of any device
  std::vector<Referrer> host_tensors{};  ///< the same of large tensors of the host that keep no graph
  /// As memory ran out or grew, to the end: no variable leads to a tensor without one.
  bool looked_for_referrers = false;
  StepAllocations step_allocations{};
  /// After an OOM: the step before the one that failed, from its beginning to its end. None where no step was whole. Its
  /// blocks that never died are what the failing step began with.
  StepAllocations complete{};
  std::vector<TimelinePoint> timeline{};  ///< at most 2000, the peak always among them
  std::vector<OutOfMemory> ooms{};        ///< in order
  std::vector<Mark> marks{};              ///< the first 1000
  std::optional<OutOfMemory> failure{};   ///< the one that ended the program
  Attribution attribution;
  int64_t replay_error_bytes = 0;  ///< largest difference between the replay and what PyTorch counted itself
  int64_t counted_peak_bytes = 0;  ///< PyTorch's own peak, where the trace begins in the middle and may have missed it
  bool reserved_known = true;      ///< false: the trace begins in the middle and reserved bytes are a lower bound
  bool non_pytorch_measured = false;                       ///< false: nothing said how much of the GPU others use
  std::vector<InitializationStep> initialization_steps{};  ///< in order
  std::vector<NonPytorchOwner> failed_driver_requests{};   ///< the largest failed request of each library to the driver
  bool sharded = false;        ///< its process shares parameters with other ranks already: FSDP, ZeRO-3
  int64_t packed_tensors = 0;  ///< at most in one graph, saved through user hooks: their size is unknown

  bool operator==(const DeviceHistory&) const = default;
};

/// What the recorder or the virtual device had to say: kind "unsupported", "estimate", "mode", …
struct RecorderNote {
  std::string kind{}, text{};

  bool operator==(const RecorderNote&) const = default;
};

/// A place that read values from a virtual GPU, where no kernel had computed them.
struct DeviceRead {
  std::string_view op{};  ///< in backward the node; empty where the program copied by itself
  std::string_view source{};
  int64_t count = 0;

  bool operator==(const DeviceRead&) const = default;
};

struct History {
  AllocatorSettings settings;
  std::vector<DeviceHistory> devices{};  ///< those that were used
  uint32_t steps = 0;                    ///< the last step that began
  std::vector<RecorderNote> notes{};     ///< each once, by first appearance
  std::vector<DeviceRead> reads{};       ///< each place once

  bool operator==(const History&) const = default;
};

}  // namespace oomdiag
