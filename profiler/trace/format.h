#pragma once
// The trace file: what it looks like on disk.
//
//   ┌ header ┬ names ─────────┬ contexts ┬ steps ─────────┬ kept events ┬ live blocks, one ────┬ chunks of events ───┐
//   │ 4 KiB  │ length + bytes │ 32 bytes │ 8 bytes each:  │ names of    │ table per device:    │ header + events of  │
//   │        │                │ each     │ where it ended │ tensors     │ their alloc events   │ one thread each     │
//   └────────┴────────────────┴──────────┴────────────────┴─────────────┴──────────────────────┴─────────────────────┘
//
// Where the writer's machine has larger pages the names begin with the second page. What does not change with the machine
// is the order of bytes: all that CUDA runs on has the lowest first.
//
// The file is created sparse and mapped shared (shared_file.h); pages are reserved before they are used, because a store into
// an unreserved page of a full disk is a SIGBUS in the user's training. What was stored survives SIGKILL: it is in the page
// cache. Writers publish by storing one word last (an event's sequence, a section's count), so a reader never sees
// half a record, whenever the process died.
//
// A chunk is written by one thread at a time; what a thread leaves of it goes to another. When the budget is used up, the
// chunk whose newest event is the oldest is taken again, of those that no thread holds.
// So the newest events are always there, and what was alive before them is in the tables of live blocks. Steps are listed
// apart, so that they are counted rightly, and the age of a live block is known, when the events that record them are
// gone; and so are the events that name parameters and buffers, or give the stack of a line, which are written only
// once.

#include <atomic>
#include <cstdint>
#include <string_view>

namespace oomdiag {

inline constexpr char kTraceMagic[8] = {'O', 'O', 'M', 'D', 'I', 'A', 'G', '1'};
inline constexpr uint32_t kTraceVersion = 3;
inline constexpr uint32_t kMaxDevices = 16;

/// A GPU as the diagnosed process saw it.
struct DeviceInfo {
  char name[64] = {};
  int64_t total_bytes = 0;
  int32_t compute_major = 0;
  int32_t compute_minor = 0;
  int64_t context_bytes = 0;  ///< what the GPU's data file says a context takes; 0 on a real GPU
  int64_t cublas_workspace_bytes = 0;
};

/// How the process ended, as far as it could say so itself.
enum class EndState : uint32_t {
  running = 0,         ///< killed, or ended by _exit
  exited = 1,          ///< reached exit()
  recorder_failed = 2  ///< the recorder switched itself off before the end: see `failure`
};

/// How the note begins of something inside PyTorch or Python that the recorder knows by its name and that is not there. Its
/// kind is what a report lacks without it.
inline constexpr std::string_view kNotFound = "not found in ";

/// First 4 KiB of the file. Plain fields are written before `magic`; atomics change while recording.
struct TraceHeader {
  char magic[8] = {};
  uint32_t version = 0;
  uint32_t header_bytes = 0;
  uint64_t file_bytes = 0;
  int32_t pid = 0;
  int32_t rank = 0;
  int32_t world_size = 1;
  uint32_t device_count = 0;
  uint64_t names_offset = 0, names_bytes = 0;
  uint64_t contexts_offset = 0, contexts_capacity = 0;
  uint64_t steps_offset = 0, steps_capacity = 0;
  uint64_t kept_offset = 0, kept_capacity = 0;
  uint64_t tables_offset = 0, slots_per_device = 0;
  uint64_t chunks_offset = 0, chunk_bytes = 0, chunk_capacity = 0;
  uint64_t start_ticks = 0, start_time_ns = 0;  ///< CLOCK_MONOTONIC
  uint32_t virtual_device = 0;
  uint32_t python = 0;  ///< a Python interpreter was in the process
  char torch_version[32] = {};
  char allocator_settings[512] = {};
  char command[512] = {};
  DeviceInfo devices[kMaxDevices] = {};

  std::atomic<uint64_t> end_ticks = 0, end_time_ns = 0;  ///< the second pair; refreshed at steps and at the end
  std::atomic<uint64_t> last_sequence = 0;               ///< sequences handed out so far
  std::atomic<uint64_t> names_used = 0;                  ///< bytes
  std::atomic<uint32_t> context_count = 0;
  std::atomic<uint32_t> chunk_count = 0;     ///< chunks taken so far, counting reuse
  std::atomic<uint64_t> dropped_events = 0;  ///< written nowhere: no space, no thread slot
  std::atomic<uint64_t> dropped_names = 0;   ///< names and contexts that did not fit
  std::atomic<uint64_t> dropped_slots = 0;   ///< live blocks that found no slot
  std::atomic<uint64_t> dropped_driver = 0;  ///< driver allocations that did not fit into the tracking table
  std::atomic<uint64_t> deep_calls = 0;  ///< ops and scopes nested too deeply to be kept apart from those around them
  std::atomic<uint64_t> folded_names =
      0;  ///< scopes and marks recorded under a common name, their numbers replaced by '#'
  std::atomic<uint32_t> step_count = 0;   ///< steps listed; entry i is the last event of step 1 + i ∙ step_stride
  std::atomic<uint32_t> step_stride = 1;  ///< doubled, and every other entry dropped, when the list is full
  std::atomic<uint32_t> steps_by_optimizer = 0;  ///< a step ends with an optimizer's step, else with its backward pass
  std::atomic<uint64_t> kept_count = 0;          ///< events kept so far; only the newest are there
  std::atomic<EndState> end_state = EndState::running;
  std::atomic<uint32_t> steady_steps =
      0;  ///< optimizer steps in which the places of allocations are those of a learned step
  std::atomic<uint32_t> python_ended = 0;  ///< Python had begun to end: the program's own work was done
  char failure[128] = {};
  uint32_t steps_before = 0;  ///< optimizer steps that were over when recording began
  uint32_t unwatched = 0;     ///< the allocator reports nothing: only its totals are known, from memory_stats
  std::atomic<uint64_t> unnumbered_threads = 0;  ///< threads whose autograd nodes are joined with no forward op
};
inline constexpr uint64_t kHeaderBytes = 4096;
static_assert(sizeof(TraceHeader) <= kHeaderBytes);

/// First 64 bytes of a chunk. Events with a sequence below `first_sequence` are left over from the chunk's last use.
struct alignas(64) ChunkHeader {
  std::atomic<uint64_t> first_sequence = 0;  ///< 0: never used
};
static_assert(sizeof(ChunkHeader) == 64);

}  // namespace oomdiag
