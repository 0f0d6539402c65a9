#include "extension/record/thread_state.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include "extension/record/session.h"

namespace oomdiag {

namespace {

// A bare pointer in the static block of thread-local memory: reading it costs no guard and no call.
[[gnu::tls_model("initial-exec")]] thread_local ThreadState* state = nullptr;

// Never destroyed: threads may end after everything static.
struct Registry {
  std::mutex mutex;
  std::vector<ThreadState*> threads;
};
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

struct StateOwner {
  bool armed = false;
  ~StateOwner() {
    if (state == nullptr) return;
    const std::lock_guard lock(registry().mutex);
    std::erase(registry().threads, state);
    delete state;
    state = nullptr;
  }
};
thread_local StateOwner owner;

}  // namespace

ThreadState* existing_thread_state() noexcept { return state; }

ThreadState& thread_state() {
  if (state == nullptr) [[unlikely]] {
    state = new ThreadState(the_session->writer());
    owner.armed = true;
    state->thread = static_cast<uint16_t>(at::RecordFunction::currentThreadId());
    state->claimed = at::sequence_number::peek();
    const std::lock_guard lock(registry().mutex);
    registry().threads.push_back(state);
  }
  return *state;
}

std::mutex& threads_mutex() { return registry().mutex; }

const std::vector<ThreadState*>& all_threads() { return registry().threads; }

size_t ThreadState::running_nodes() const noexcept {
  size_t count = node_adopted ? 1 : 0;
  for (uint32_t i = 0; i < depth; ++i) count += frames[i].runs_node ? 1 : 0;
  return count;
}

Event ThreadState::event(EventKind kind) const noexcept { return event(kind, read_ticks()); }

Event ThreadState::event(EventKind kind, uint64_t time) const noexcept {
  Event event;
  event.time = time;
  event.kind = kind;
  event.context = context_id;
  event.op_serial = op_serial;
  event.node_sequence = node_sequence;
  event.node_thread = node_thread;
  event.thread = thread;
  return event;
}

}  // namespace oomdiag
