#include "extension/record/thread_state.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <cstring>

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
    state = new ThreadState;
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

// Ops have names that stay where they are; those of nodes and scopes are temporary, so the text is compared always.
uint32_t InternCache::name(const char* text) {
  NameEntry& entry = by_pointer_[(reinterpret_cast<uintptr_t>(text) >> 4) % kEntries];
  if (entry.pointer == text && std::strcmp(entry.text->c_str(), text) == 0) return entry.id;
  const uint32_t id = name(std::string_view(text));
  entry = {text, &names_.find(std::string_view(text))->first, id};
  return id;
}

uint32_t InternCache::name(std::string_view text) {
  const auto known = names_.find(text);
  if (known != names_.end()) return known->second;
  const uint32_t id = session().writer().intern(text);
  names_.emplace(text, id);
  return id;
}

uint32_t InternCache::context(const Context& context) {
  uint64_t words[4];
  static_assert(sizeof words == sizeof(Context));
  std::memcpy(words, &context, sizeof words);
  uint64_t hash = words[0] * 0x9E3779B97F4A7C15u;
  for (int i = 1; i < 4; ++i) hash = (hash ^ words[i] ^ hash >> 29) * 0x9E3779B97F4A7C15u;
  ContextEntry& entry = contexts_[(hash >> 40) % kEntries];
  if (entry.id != 0 && entry.context == context) return entry.id;
  if (context == Context{}) return 0;
  entry = {context, session().writer().intern(context)};
  return entry.id;
}

uint32_t InternCache::inner_context(uint32_t outside, const Context& inside) {
  InnerEntry& entry = inner_[(outside * 0x9E3779B1u + inside.inner * 0x85EBCA77u) >> 20];
  if (entry.outside != outside || entry.inner != inside.inner) entry = {outside, inside.inner, context(inside)};
  return entry.id;
}

}  // namespace oomdiag
