#pragma once
// The border between the two halves of oomdiag: the diagnosed process writes these records, everything else reads them.

#include <cstdint>
#include <string_view>

namespace oomdiag {

/// What an Event says. `seq` below stands for (node_thread, node_sequence), the identity of an autograd node.
///
/// kind              address            bytes              detail            other fields
/// ----------------  -----------------  -----------------  ----------------  -------------------------------------------
/// alloc             block              requested bytes    stream            context, call_id; seq = node that runs
/// free_requested    block              requested bytes    stream            call_id, seq of whoever frees; context of the alloc
/// free_completed    block              requested bytes    stream            the same; only where it comes later than the request, as
///                                                                           after record_stream: else the request has kFreeCompleted
/// segment_*         segment or range   its bytes          stream
/// out_of_memory     free on the GPU   rounded bytes      stream            context, call_id, seq: the state when the allocator gave up
/// device_memory     free on the GPU   total of the GPU  0                 cudaMemGetInfo, beside every memory_stats
/// memory_stats      reserved now       allocated now      peak reserved     node_sequence = peak allocated (DeviceStats)
/// segment_state     segment            its bytes          stream            layout at an OOM, from the allocator's snapshot; with
///                                                                           kBeforeRecording that at the beginning
/// block_state       block              block bytes        requested bytes   flags: BlockFlag
/// requested_gradient
///                   0                  tensor bytes       name: shape       seq = the node whose output gradient was being made
/// op_failed         0                  0                  0                 context, call_id, seq: the op that an exception left first
/// scope_begin, _end 0                  0                  name of the scope context is that inside the scope
/// nodes_created     node + 1, or 0     how many           its thread        context, call_id: the forward op that made them; first
///                                                                           number in node_sequence, on thread node_thread. The
///                                                                           node is the one that ran the op, as checkpointing does
/// graph_begin       number of nodes    0                  graph task        the results of a walk follow: saved_tensor, parameter, gradient
/// saved_tensor      storage            storage bytes      name: shape       seq = the node that saved it; context names that node
/// packed_tensor     0                  0                  how many          saved through user hooks: size unknown; seq, context as above
/// parameter         storage            storage bytes      name: shape       context.module may be its name
/// buffer            storage            storage bytes      name: shape       context.module is its name
/// gradient          storage            storage bytes      name: shape       seq = its AccumulateGrad node, where known
/// grouped           storage            storage bytes      name: group       a parameter, its gradient or optimizer state: its parameter
///                                                                           group; address 0: the group that the OOM before was for
/// referrer          storage            of the tensor      name: variable    what refers to the tensor as the interpreter ends: "list
///                                                                           'history' in train.py"; call_id: how many autograd nodes
///                                                                           it keeps that none of the referrers before does, of a
///                                                                           tensor in a graph at least 1;
///                                                                           node_sequence: name of the tensor's shape, or 0;
///                                                                           address 0: a tensor of the host that keeps a graph
///                                                                           or is large; with kPadded, data of any device: bytes =
///                                                                           length of its longest sequence without padding,
///                                                                           call_id = per mille of it that are no padding;
///                                                                           or, without a name, the search for them begins, or
///                                                                           with kSearchCutShort ends
/// note              0                  0                  name              context.op names the kind: "unsupported", "estimate", "mode",
///                                                                           "settings", "mark"; with kNoteRead, the op that looked at what no
///                                                                           host had written
/// stack             name: source line  0                  name: its stack   the calls by which that line was first reached, one per
///                                                                           line of text, innermost first; address 0: of the OOM;
///                                                                           with kNativeStack its C++ calls
/// driver_alloc      pointer or handle  asked of the       name: the shared  flags: DriverMemory, kDriver…; context, call_id as in alloc;
///                                      driver             object that asked  context.source is the stack where one was asked for
/// driver_map        mapped at          its bytes          the handle        cuMemMap of a handle that libc10_cuda did not ask for
/// driver_free       the same           the same           the same          … of an allocation that was seen
/// gpu_step         used on the GPU   taken by the step  name: what        free memory went down: "cuInit", "context", "modules of …"
/// gpu_process      pid                held on the GPU   name of the       another process; flags: kFirstProcess
///                                                         process
enum class EventKind : uint8_t {
  none = 0,
  alloc,
  free_requested,
  free_completed,
  segment_alloc,
  segment_free,
  segment_map,
  segment_unmap,
  out_of_memory,
  device_memory,
  memory_stats,
  segment_state,
  block_state,
  requested_gradient,
  op_failed,
  scope_begin,
  scope_end,
  nodes_created,
  graph_begin,
  saved_tensor,
  packed_tensor,
  parameter,
  buffer,
  gradient,
  note,
  stack,
  driver_alloc,
  driver_map,
  driver_free,
  gpu_step,
  gpu_process,
  grouped,
  referrer,
};
inline constexpr EventKind kLastEventKind = EventKind::referrer;

/// Flags of free_requested, block_state, segment_state, note, stack, referrer and out_of_memory, and of slots in the table of live blocks.
enum EventFlag : uint16_t {
  kBlockAllocated = 1,     ///< block_state: in use
  kBlockPendingFree = 2,   ///< block_state: freed, but still in use on another stream
  kSegmentLarge = 4,       ///< segment_state: of the large pool (blocks above 1 MiB)
  kSegmentExpandable = 8,  ///< segment_state: mapped piecewise
  kFreeCompleted = 16,     ///< free_requested: completed at once, no free_completed follows
  kNoteRead = 32,          ///< note: context is that of an op which read values from a virtual GPU
  kBeforeRecording = 64,   ///< segment_state, block_state: what the GPU held when recording began, or went on
  kSlotFreed = 128,        ///< slot: no longer in use; `detail` is the sequence of its free_requested, 0 = not seen
  kNativeStack = 256,      ///< stack: the calls are C++ functions, "train+0x4f1a in step(long)"
  kModulesEvaluate = 512,  ///< stack of an OOM: modules with parameters or layers run, all in evaluation mode
  kAsksForCheckpoints =
      1024,               ///< stack of an OOM: an attribute of a running module, as gradient_checkpointing, is True
  kCopiesDeeply = 2048,   ///< stack of an OOM: copy.deepcopy() runs, called by the innermost line
  kNamesBackward = 4096,  ///< stack of an OOM: a function of the user's on it has the word backward in it
  kWantsGradient = 1,     ///< referrer: requires_grad_() was called for the tensor, which is no parameter
  kIsParameter = 2,       ///< referrer: the tensor is an nn.Parameter, whether its module was ever called or not
  kSearchCutShort = 4,    ///< referrer without address and name: the search ends before it has come to all
  kOfNewestSteps = 8,     ///< referrer: all nodes that it keeps are of the step that runs and the one before
  kPadded = 16,           ///< referrer without address: data of which more than half is padding
  kGraphUnchanged = 1,    ///< graph_begin at an OOM: what the walk before it found still holds, and nothing follows
  kAskedByLibrary = 256,  ///< out_of_memory: a library asked the driver, not PyTorch's allocator
};

/// Flags of alloc, out_of_memory, segment_… and segment_state: the highest seven bits give the pool. 0 is the one that
/// everything shares; private ones (MemPool, CUDA graphs) are numbered as they appear, and those from the 127th on share it.
inline constexpr int kPoolShift = 9;
inline constexpr uint16_t kMaxPools = 127;
constexpr uint8_t pool_of(uint16_t flags) { return static_cast<uint8_t>(flags >> kPoolShift); }
constexpr uint16_t pool_flag(uint8_t pool) { return static_cast<uint16_t>(pool << kPoolShift); }

/// What the driver was asked for; the low bits of the flags of driver_alloc and driver_free.
enum class DriverMemory : uint16_t {
  device,   ///< cuMemAlloc
  handle,   ///< cuMemCreate: pages that are mapped later; the address is the handle
  pool,     ///< cuMemAllocAsync, cuMemAllocFromPoolAsync
  array,    ///< cuArrayCreate
  managed,  ///< cuMemAllocManaged: on the GPU or on the host, as it is used
  pinned,   ///< cuMemHostAlloc, cuMemHostRegister: of the host, not of the GPU
};
inline constexpr DriverMemory kLastDriverMemory = DriverMemory::pinned;

/// Further flags of driver_alloc and gpu_process.
enum DriverFlag : uint16_t {
  kDriverMemoryMask = 0xff,
  kDriverOutOfMemory = 0x100,  ///< driver_alloc: the driver ran out of memory
  kDriverAnnounced = 0x200,    ///< driver_alloc: still alive, and perhaps older than the oldest event kept
  kFirstProcess = 0x400,       ///< gpu_process: the processes listed before are out of date; pid 0 stands for none
};
/// The kind of note that the program itself sets, to distinguish its parts.
inline constexpr std::string_view kMark = "mark";

/// node_sequence of AccumulateGrad nodes: PyTorch gives them the largest number, so that they run first.
inline constexpr uint64_t kAccumulateGrad = ~uint64_t{0};
/// node_sequence of events outside of any autograd node.
inline constexpr uint64_t kNoNode = ~uint64_t{0} - 1;

/// One fact, 64 bytes. `sequence` orders all events of a process, starts at 1 and is stored last: 0 = not written.
struct alignas(64) Event {
  uint64_t sequence = 0;
  uint64_t time = 0;  ///< the processor's counter (read_ticks); the trace header converts it to nanoseconds
  uint64_t address = 0;
  int64_t bytes = 0;
  uint64_t detail = 0;
  uint64_t node_sequence = kNoNode;  ///< autograd node: its sequence_nr; kNoNode where none runs
  uint32_t context = 0;              ///< index into the contexts of the trace
  uint32_t call_id = 0;              ///< which call of the outermost op, unique in the process; 0 outside of any op
  uint16_t node_thread = 0;          ///< autograd node: logical number of the thread of its forward op
  uint16_t thread = 0;               ///< logical number of the writing thread (RecordFunction::currentThreadId)
  EventKind kind = EventKind::none;
  uint8_t device = 0;
  uint16_t flags = 0;  ///< EventFlag

  bool operator==(const Event&) const = default;
};
static_assert(sizeof(Event) == 64);

/// Where in the program an event happened: indices into the names of the trace, 0 = not known or none.
struct Context {
  uint32_t op = 0;            ///< outermost operator, "aten::max_pool2d"
  uint32_t inner = 0;         ///< innermost operator, "aten::max_pool2d_with_indices"
  uint32_t node = 0;          ///< autograd node that runs, "ReluBackward0"
  uint32_t module = 0;        ///< path of modules or user scopes, "layer3.5.conv2"
  uint32_t source = 0;        ///< the user's frame, "train.py:31"
  uint32_t scope = 0;         ///< scope that PyTorch opened, "Optimizer.step#Adam.step"
  uint32_t flags = 0;         ///< ContextFlag
  uint32_t inner_source = 0;  ///< innermost frame outside of torch, where it is not the user's; 0 in old traces

  bool operator==(const Context&) const = default;
};
static_assert(sizeof(Context) == 32);

enum ContextFlag : uint32_t {
  kGradMode = 1,          ///< the outermost op was dispatched to autograd with gradients enabled
  kRecomputation = 2,     ///< a forward op run by a backward node (activation checkpointing)
  kAutocastFloat16 = 4,   ///< the outermost op began under autocast to float16
  kAutocastBfloat16 = 8,  ///< … to bfloat16
};

}  // namespace oomdiag
