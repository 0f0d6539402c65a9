#pragma once

#include <cstdint>

#include "extension/record/intern_cache.h"
#include "extension/record/known_calls.h"
#include "extension/record/newest_nodes.h"
#include "extension/record/pending_oom.h"
#include "extension/record/place.h"
#include "extension/record/python.h"
#include "extension/record/running_tasks.h"
#include "extension/record/scope_names.h"
#include "extension/record/scope_path.h"
#include "extension/record/steady.h"
#include "extension/record/thread_numbers.h"
#include "profiler/event.h"
#include "profiler/trace/writer.h"

namespace oomdiag {

/// What one thread is doing. Each part is changed by its own functions only; the allocator's hook reads them on that thread.
struct ThreadState {
  /// `number` is that of the thread, `id` PyTorch's own.
  ThreadState(TraceWriter& writer, uint16_t number, uint64_t id)
      : thread(number), thread_of_nodes(ThreadNumbers::of_node(id)), names(writer), training(number) {}

  const uint16_t thread;
  const uint16_t thread_of_nodes;  ///< the node_thread of the nodes that this thread makes
  uint64_t next_node = 0;          ///< autograd nodes below it are written with the op that made them, or not at all
  PendingOom oom;
  Place place;
  RunningTasks tasks;
  ScopePath scope_path;
  InternCache names;
  ScopeNames scopes;
  KnownPlaces known_places;
  KnownCalls calls;
  NewestNodes newest_nodes;
  DescribedGraph described_graph;
  StepOfThread training;
  StepDivergence divergence;

  /// An event of this kind, at this time, with everything filled in that this thread knows.
  Event event(EventKind kind, uint64_t time) const noexcept;
  Event event(EventKind kind) const noexcept;
};

/// The state of this thread; made at the first call.
ThreadState& thread_state();
/// The same, or null where there is none yet. Never allocates.
ThreadState* existing_thread_state() noexcept;

}  // namespace oomdiag
