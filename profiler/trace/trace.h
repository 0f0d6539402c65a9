#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/event.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/format.h"

namespace oomdiag {

/// What a trace says about its process.
struct ProcessInfo {
  int pid = 0;
  int rank = 0;
  int world_size = 1;
  bool virtual_device = false;
  bool python = false;
  bool snapshot = false;  ///< made of a PyTorch memory snapshot: it names no phases, steps and tensors
  std::string torch_version;
  std::string allocator_settings;
  std::string command;
  EndState end_state = EndState::running;
  uint32_t steady_steps = 0;     ///< optimizer steps in which the places of allocations are those of a learned step
  bool python_ended = false;     ///< Python had begun to end: the program's own work was done
  std::string recorder_failure;  ///< why the recorder switched itself off, or empty
  uint32_t steps_before = 0;     ///< optimizer steps that were over when recording began
  bool unwatched = false;        ///< the allocator reported nothing: only its own totals are known
  uint64_t start_time_ns = 0;    ///< CLOCK_MONOTONIC when recording began
};

/// A GPU as the diagnosed process saw it.
struct Device {
  std::string name;
  int64_t total_bytes = 0;
  int compute_major = 0;
  int compute_minor = 0;
  int64_t context_bytes = 0;           ///< modelled; 0 on a real GPU
  int64_t cublas_workspace_bytes = 0;  ///< per (handle, stream), as PyTorch chooses it; 0 = not known
};

/// A trace file, read and put in order. Index 0 of `names` is empty, index 0 of `contexts` says nothing.
struct Trace {
  ProcessInfo process;
  std::vector<Device> devices;
  std::vector<std::string> names;
  std::vector<Context> contexts;
  std::vector<uint32_t>
      stack_marks{};           ///< of a snapshot: what the stack of each context says (replay/evidence/stack_rules.h)
  EventLog events;             ///< by ascending sequence; of a trace that outgrew its budget only the newest
  std::vector<Event> initial;  ///< alloc events of the blocks that were alive before events.front()
  std::vector<Event> initial_layout{};  ///< segment_state and block_state events: the state then, where it is known
  std::vector<Event> kept{};            ///< parameter, buffer and line stack events older than events.front()
  uint64_t overwritten_events = 0;      ///< older than events.front(), no longer in the file
  uint64_t dropped_events = 0;          ///< never written
  uint64_t dropped_blocks = 0;          ///< live blocks that found no slot in the table
  uint64_t dropped_names = 0;           ///< names and contexts that did not fit
  uint64_t dropped_driver = 0;          ///< driver allocations that did not fit into the tracking table
  uint64_t deep_calls = 0;              ///< ops nested too deeply to be distinguished from those around them
  uint64_t folded_names = 0;  ///< scopes and marks recorded under a common name, their numbers replaced by '#'
  uint64_t unnumbered_threads =
      0;  ///< threads that began when 65 534 others had: their nodes are joined with no forward op
  std::vector<uint64_t> step_ends{};  ///< entry i: sequence of the last event of step 1 + i ∙ step_stride; whole run
  uint32_t step_stride = 1;           ///< above 1 only in runs of more than a million steps
  bool steps_by_optimizer = false;    ///< a step ends with an optimizer's step, else with its backward pass
  double ns_per_tick = 1;
  uint64_t start_ticks = 0;

  /// The name with this index, empty if there is none.
  std::string_view name(uint64_t index) const {
    return index < names.size() ? std::string_view(names[index]) : std::string_view();
  }
  /// The context with this index; a corrupt index gives one that says nothing.
  const Context& context(uint32_t index) const {
    static constexpr Context kNothing;
    return index < contexts.size() ? contexts[index] : kNothing;
  }
  /// What the stack of the context with this index says; 0 where that is not known.
  uint32_t marks_of(uint32_t context) const { return context < stack_marks.size() ? stack_marks[context] : 0; }
  /// The step that the event with this sequence belongs to, counted from 1, or on from where recording began, also what comes before the
  /// first forward op. With a stride above 1 the first step that it may be.
  uint32_t step_of(uint64_t sequence) const;
  /// Nanoseconds since recording began.
  int64_t time_ns(const Event& event) const;
};

/// Reads only what a trace says about its process. Throws as read_trace does.
ProcessInfo read_process(const std::filesystem::path& file);

/// Reads a trace, also one whose process was killed or is still running. Its events stay in the file, which is kept open
/// but may be deleted; what is overwritten or cut off later reads as an event of kind none (EventLog::lost). Throws Error(input) if `file` is not a trace or
/// its header makes no sense; damage elsewhere costs the damaged records only.
Trace read_trace(const std::filesystem::path& file);

}  // namespace oomdiag
