#include "extension/record/thread_state.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include "extension/record/fork_and_exit.h"
#include "extension/record/place.h"
#include "extension/record/session.h"
#include "profiler/event.h"
#include "profiler/trace/ticks.h"

namespace oomdiag {

namespace {

// A bare pointer in the static block of thread-local memory: reading it costs no guard and no call.
[[gnu::tls_model("initial-exec")]] thread_local ThreadState* state = nullptr;

struct StateOwner {
  bool armed = false;
  ~StateOwner() {
    if (state == nullptr || in_forked_child()) return;
    the_session->learner().remove(state->training);
    the_session->thread_numbers().release(state->thread);
    delete state;
    state = nullptr;
  }
};
thread_local StateOwner owner;

[[gnu::noinline]] ThreadState& make_state() {
  const uint64_t id = at::RecordFunction::currentThreadId();
  state = new ThreadState(the_session->writer(), the_session->thread_numbers().take(id), id);
  if (state->thread_of_nodes == ThreadNumbers::kUnnumbered) {
    the_session->writer().header().unnumbered_threads.fetch_add(1, std::memory_order_relaxed);
  }
  owner.armed = true;
  state->next_node = at::sequence_number::peek();
  the_session->learner().add(state->training);
  return *state;
}

}  // namespace

ThreadState* existing_thread_state() noexcept { return state; }

ThreadState& thread_state() { return state != nullptr ? *state : make_state(); }

Event ThreadState::event(EventKind kind) const noexcept { return event(kind, read_ticks()); }

Event ThreadState::event(EventKind kind, uint64_t time) const noexcept {
  Event event;
  event.time = time;
  event.kind = kind;
  const WorkPlace& now = place.now();
  event.context = now.context_id;
  event.call_id = now.call_id;
  event.node_sequence = now.node_sequence;
  event.node_thread = now.node_thread;
  event.thread = thread;
  return event;
}

}  // namespace oomdiag
