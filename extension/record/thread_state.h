#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "extension/record/intern_cache.h"
#include "extension/record/known_calls.h"
#include "extension/record/newest_nodes.h"
#include "extension/record/python.h"
#include "extension/record/running_tasks.h"
#include "extension/record/scope_names.h"
#include "extension/record/steady.h"
#include "extension/record/thread_numbers.h"
#include "profiler/event.h"

namespace oomdiag {

/// Where in the program a thread is: the op, module and line, and the autograd node.
struct WorkPlace {
  Context context;
  uint32_t context_id = 0;
  uint32_t op_serial = 0;
  uint64_t node_sequence = kNoNode;
  uint16_t node_thread = 0;
};

/// What is undone when an op, node or scope ends.
struct Frame {
  const void* call = nullptr;  ///< the RecordFunction that opened it
  WorkPlace outside;           ///< where the thread was, and is again afterwards
  bool is_outermost = false;   ///< the outermost op, or a node
  bool is_builtin = false;     ///< an op of PyTorch's own
  bool is_accumulate = false;  ///< an AccumulateGrad node
  bool runs_node = false;      ///< a node, or the op inside of one that was not watched when it began
  bool is_optimizer_step = false;
  uint32_t scope_name = 0;  ///< of a user scope, else 0

  /// Nothing is to be done at its end but to go back.
  bool is_plain() const { return !is_accumulate && scope_name == 0; }
};

/// What one thread is doing: read by the allocator's hook on the same thread, written by the op callbacks.
struct ThreadState : WorkPlace {
  static constexpr uint32_t kMaxDepth = 192;

  /// `number` is that of the thread, `id` PyTorch's own.
  ThreadState(TraceWriter& writer, uint16_t number, uint64_t id)
      : thread(number), thread_of_nodes(ThreadNumbers::of_node(id)), names(writer), training(number) {}

  const uint16_t thread;
  const uint16_t thread_of_nodes;  ///< the node_thread of the nodes that this thread makes
  bool refused = false;            ///< the allocator gave up inside the op that runs
  Event refusal;
  uint32_t described_serial = 0;  ///< the op in which an OOM was last described in full
  uint64_t claimed = 0;           ///< node numbers of this thread below this one have a forward op
  uint32_t depth = 0;
  Frame frames[kMaxDepth];
  RunningTasks tasks;
  bool node_adopted = false;             ///< a node runs that has no frame: RunningNode
  std::string module_path;               ///< of the user scopes that are open
  std::vector<std::string> outer_paths;  ///< one for each open scope: what to go back to
  InternCache names;
  ScopeNames scopes;
  KnownPlaces places;
  KnownCalls calls;
  NewestNodes newest_nodes;
  StepOfThread training;
  Surprise surprise;

  /// How many autograd nodes run on this thread, one inside of another.
  size_t running_nodes() const noexcept;
  /// An event of this kind, at this time, with everything filled in that this thread knows.
  Event event(EventKind kind, uint64_t time) const noexcept;
  Event event(EventKind kind) const noexcept;
};

/// The state of this thread; made at the first call.
ThreadState& thread_state();
/// The same, or null where there is none yet. Never allocates.
ThreadState* existing_thread_state() noexcept;

}  // namespace oomdiag
