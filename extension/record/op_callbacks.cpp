#include "extension/record/op_callbacks.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "extension/cupti/collector.h"
#include "extension/record/allocator_hooks.h"
#include "extension/record/fork_and_exit.h"
#include "extension/record/graph_walk.h"
#include "extension/record/internal_names.h"
#include "extension/record/known_calls.h"
#include "extension/record/learned_step.h"
#include "extension/record/place.h"
#include "extension/record/python.h"
#include "extension/record/scope_names.h"
#include "extension/record/session.h"
#include "extension/record/steady.h"
#include "extension/record/thread_numbers.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/trace/ticks.h"

// Every op of every thread passes here twice. The start callback notes what now runs in the thread's state, which the
// allocator's hook copies into its events; the end callback puts back what ran before. Almost nothing is written: only
// which forward op made which autograd nodes, and the scopes.
//
// The join. PyTorch numbers the autograd nodes of a thread; a backward event carries the number of its node. Which forward op
// made a node is found by watching the thread's counter: numbers that appeared since the last callback belong to the
// innermost op that is open; what is left at an op's end belongs to that op.

namespace oomdiag {

namespace {

std::atomic<bool> outputs_watched = false;  // the callback that boxes the outputs is on

constexpr std::string_view kEnginePrefix = "autograd::engine::evaluate_function: ";

std::atomic<bool> node_was_entered = false;  // under that name

// Nodes in which ops run, while none was entered: the engine does not name them as we think.
void count_unentered_node(uint64_t sequence) {
  constexpr int kEnough = 8;  // a recording may begin inside of some
  static std::atomic<uint64_t> newest = kNoNode;
  static std::atomic<int> count = 0;
  if (node_was_entered.load(std::memory_order_relaxed) || newest.exchange(sequence) == sequence) return;
  if (count.fetch_add(1) + 1 == kEnough) note_missing(InternalName::node_event);
}

// The first word of a node is the address of its table of virtual functions, before which the type lies: steady.cpp
// distinguishes kinds of nodes by it.
void check_node_type(const torch::autograd::Node& node) {
  const void* const* table = nullptr;
  std::memcpy(&table, &node, sizeof table);
  if (table[-1] == &typeid(node)) return;
  note_missing(InternalName::node_type);
  restart_learning(false);
}

void claim_nodes(ThreadState& state) {
  const uint64_t next = at::sequence_number::peek();
  const uint64_t first = state.next_node;
  if (next <= first) [[likely]]
    return;
  Event event = state.event(EventKind::nodes_created);
  const WorkPlace& now = state.place.now();
  if (now.node_sequence < kNoNode) {
    event.address = now.node_sequence + 1;
    event.detail = now.node_thread;
  }
  event.node_sequence = first;
  event.node_thread = state.thread_of_nodes;
  event.bytes = static_cast<int64_t>(next - first);
  state.next_node = next;
  if (event.node_thread != ThreadNumbers::kUnnumbered) {
    learn(state, event);
    session().writer().write(event);
  }
  if (now.context.node == 0) session().steps().note_forward([] { return session().live_bytes(); });
}

// Recording stopped inside of the call: it may go on some day, and then nothing must be left of it.
void forget_frame(const at::RecordFunction& call) {
  Frame frame;
  if (ThreadState* state = existing_thread_state(); state != nullptr) state->place.leave(&call, state->names, frame);
}

// Steady training ended in the middle of a node, which has no frame: the op that starts in it would pass for a forward op.
// True if there is one; what adopts it counts as the node for as long as it lasts.
bool adopt_running_node(ThreadState& state) {
  const auto node = torch::autograd::get_current_node();
  if (!node) [[likely]]
    return false;
  state.place.adopt_node(state.names.name(std::string_view(node->name())), node->sequence_nr(),
                         ThreadNumbers::of_node(node->thread_id()));
  join_graph_task(state, state.place.running_nodes(), torch::autograd::get_current_graph_task_id(), node.get());
  return true;
}

void enter_outermost_op(ThreadState& state, Frame& frame, uint32_t name, bool is_differentiated) {
  frame.is_outermost = true;
  if (!state.place.in_node()) frame.runs_node = adopt_running_node(state);
  WorkPlace& now = state.place.change();
  if (frame.runs_node) count_unentered_node(now.node_sequence);
  if (!outputs_watched.load(std::memory_order_relaxed) && session().near_the_limit()) watch_outputs(true);
  now.context.op = name;
  now.call_id = session().next_call_id();
  session().steps().note_op();
  if (is_differentiated) now.context.flags |= kGradMode;
  now.context.flags |= autocast_flags();
  const bool forward = !state.place.in_node();
  if (!forward && is_differentiated) now.context.flags |= kRecomputation;
  // Inside PyTorch's own scopes (an optimizer's step) the line is that of the scope.
  if ((forward || is_differentiated) && now.context.scope == 0) locate_in_python(now.context, state.known_places);
}

/// `known` may be null: the op was not called from this place before.
void enter_op(ThreadState& state, Frame& frame, const char* name, const at::RecordFunction& call,
              const KnownCall* known) {
  WorkPlace& now = state.place.change();
  KnownCall call_seen{.text = name, .outside = now.context_id};
  call_seen.name = known != nullptr ? known->name : state.names.name(call_seen.text);
  call_seen.is_builtin = known != nullptr ? known->is_builtin : std::string_view(call_seen.text).starts_with("aten::");
  frame.is_builtin = call_seen.is_builtin;
  if (now.context.op == 0) enter_outermost_op(state, frame, call_seen.name, call.seqNr() >= 0);
  now.context.inner = call_seen.name;
  if (frame.is_outermost) {
    now.context_id = state.names.context(now.context);
  } else if (known != nullptr && known->inside != 0) {
    now.context_id = known->inside;
  } else {
    now.context_id = state.names.inner_context(call_seen.outside, now.context);
    if (call_seen.outside != 0) call_seen.inside = now.context_id;
  }
  if (known == nullptr && is_registered(call)) state.calls.add(call_seen);
}

void enter_node(ThreadState& state, Frame& frame, std::string_view name) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return;
  if (!node_was_entered.load(std::memory_order_relaxed) && !node_was_entered.exchange(true)) check_node_type(*node);
  session().steps().note_backward();
  frame.is_outermost = true;
  frame.is_accumulate = name.ends_with("AccumulateGrad");
  const InternCache::Node known = state.names.node(name);
  state.place.change() = {.context = {.node = known.name},
                          .context_id = known.context,
                          .call_id = session().next_call_id(),
                          .node_sequence = node->sequence_nr(),
                          .node_thread = ThreadNumbers::of_node(node->thread_id())};
  const size_t level = state.place.running_nodes();
  frame.runs_node = true;
  enter_graph_task(state, level, torch::autograd::get_current_graph_task_id(), node.get());
}

void enter_scope(ThreadState& state, Frame& frame, std::string_view name) {
  const ScopeName& scope = state.scopes.find(name, session().scope_names(), state.names);
  if (scope.of_profiler) return;
  if (scope.is_folded()) session().writer().header().folded_names.fetch_add(1, std::memory_order_relaxed);
  frame.scope_name = scope.id;
  frame.is_optimizer_step = scope.is_optimizer_step;
  if (!steady() && scope.of_optimizer) register_optimizer();
  state.scope_path.enter();
  WorkPlace& now = state.place.change();
  const LearnedScope* const expected = steady() ? repeat_scope(state, frame.scope_name) : nullptr;
  if (expected != nullptr) {
    now.context.source = expected->context.source;
    now.context.inner_source = expected->context.inner_source;
  }
  if (scope.of_pytorch) {
    if (now.context.scope == 0 && expected == nullptr) locate_in_python(now.context, state.known_places);
    now.context.scope = frame.scope_name;
    now.in_optimizer |= scope.of_optimizer;
  } else {
    state.scope_path.append(scope.canonical, now.context.module == 0);
    now.context.module = state.names.name(session().canonical_name(state.scope_path.text()));
  }
  const bool is_known = expected != nullptr && expected->context == now.context;
  now.context_id = is_known ? expected->context_id : state.names.context(now.context);
  Event event = state.event(EventKind::scope_begin);
  event.detail = frame.scope_name;
  if (expected == nullptr) learn(state, event);
  session().writer().write(event);
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
  if (!recording()) return nullptr;
  ThreadState& state = thread_state();
  if (const Frame* top = state.place.innermost(); top != nullptr && top->call == &call) {
    return nullptr;  // called twice: set_calls()
  }
  prepare_recording(state);
  if (state.divergence.is_unresolved()) [[unlikely]]
    state.divergence.resolve(state);
  if (!steady()) claim_nodes(state);
  look_for_saved_tensor_hooks();
  if (state.place.is_full()) {
    session().writer().header().deep_calls.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  Frame& frame = state.place.enter(&call);
  const char* name = call.name();
  const bool is_scope = call.scope() == at::RecordScope::USER_SCOPE;
  if (state.divergence.may_go_on()) [[unlikely]]
    state.divergence.resume(state, name);
  const KnownCall* const known = is_scope ? nullptr : state.calls.find(name, state.place.now().context_id);
  if (is_scope) {
    enter_scope(state, frame, name);
  } else if (known == nullptr && std::string_view(name).starts_with(kEnginePrefix)) {
    enter_node(state, frame, name + kEnginePrefix.size());
  } else {
    enter_op(state, frame, name, call, known);
  }
  return nullptr;
}

// PyTorch's own ops may catch what the ops inside of them throw; others are the program's, and what those catch it caught.
bool runs_inside_of_builtin_op(const ThreadState& state) {
  const Frame* const top = state.place.innermost();
  return top != nullptr && top->is_builtin;
}

// An OOM leaves the op that it came up in as an exception, one of C++ or where that op is written in Python one of
// Python's, or the op recovered from it: cuDNN catches its own and takes a slower plan.
void resolve_oom(ThreadState& state) {
  Event event = state.oom.close(read_ticks());
  if (std::uncaught_exceptions() == 0 && !python_raises()) return;
  session().writer().write(event);
}

void leave_scope(ThreadState& state, const Frame& frame) {
  state.scope_path.leave();
  Event event = state.event(EventKind::scope_end);
  event.detail = frame.scope_name;
  session().writer().write(event);
  if (frame.is_optimizer_step) session().steps().note_optimizer_step(session().live_bytes());
  if (frame.is_optimizer_step || !steady()) session().writer().mark_time();
  resume_collecting();
}

// True if it is to be written now which tensors are of which parameter group, which is noted: where it may be the
// peak's, and again before that is overwritten.
bool claim_writing_of_groups() {
  if (!python_attached()) return false;
  Session& recording = session();
  if (!recording.fades(recording.grouped_at) && (steady() || !note_peak())) return false;
  recording.grouped_at.store(recording.writer().times_overwritten(), std::memory_order_relaxed);
  return true;
}

void on_end(const at::RecordFunction& call, at::ObserverContext*) {
  if (in_forked_child()) return;
  if (!recording()) return forget_frame(call);
  ThreadState& state = thread_state();
  if (!steady()) claim_nodes(state);
  const Frame* const top = state.place.innermost();
  if (top == nullptr) return;
  if (top->call == &call && top->is_plain() && !state.oom.is_open()) [[likely]]
    return state.place.leave();
  const Context inside = state.place.now().context;
  const uint32_t inside_id = state.place.now().context_id;
  Frame frame;
  if (!state.place.leave(&call, state.names, frame)) return;
  if (frame.is_accumulate && !state.oom.is_open()) note_accumulated_gradient(state, inside);
  if (state.oom.is_open() && frame.scope_name == 0 && !runs_inside_of_builtin_op(state)) resolve_oom(state);
  if (frame.is_optimizer_step && claim_writing_of_groups()) write_parameter_groups(false);
  if (frame.scope_name != 0) leave_scope(state, frame);
  if (frame.is_optimizer_step) end_of_step(state, inside_id);
}

void on_outputs(const at::RecordFunction& call, at::ObserverContext*) {
  if (call.seqNr() >= 0 && recording()) thread_state().newest_nodes.remember(call.outputs());
}

std::unique_ptr<at::ObserverContext> empty_start(const at::RecordFunction&) { return nullptr; }
void empty_end(const at::RecordFunction&, at::ObserverContext*) {}

/// Handles are 0 where a callback is not there. There are as few as can be, since PyTorch copies the list of all of them at
/// each node of a backward pass (ThreadLocalState): ops and scopes have one, and one that is not needed is not only
/// disabled.
struct Installed {
  std::mutex mutex;
  bool records = false;
  bool with_ops = false;  ///< `calls` is called at ops, too
  at::CallbackHandle calls = 0, outputs = 0;
};
Installed& installed() {
  static auto* instance = new Installed;
  return *instance;
}

void set(at::CallbackHandle& handle, bool on, at::RecordFunctionCallback callback) {
  if ((handle != 0) == on) return;
  if (on) {
    handle = at::addGlobalCallback(std::move(callback));
  } else {
    at::removeCallback(std::exchange(handle, 0));
  }
}

void set_calls(Installed& now, bool on, bool with_ops) {
  const at::CallbackHandle before = std::exchange(now.calls, 0);
  now.with_ops = on && with_ops;
  auto callback = at::RecordFunctionCallback(on_start, on_end);
  if (now.with_ops) {
    callback.scopes({at::RecordScope::USER_SCOPE, at::RecordScope::FUNCTION});
  } else {
    callback.scopes({at::RecordScope::USER_SCOPE});
  }
  // Add before removing: a scope that starts in between is reported twice (on_start ignores the second), never missed.
  set(now.calls, on, callback);
  if (before != 0) at::removeCallback(before);
}
void set_outputs(Installed& now, bool on) {
  auto callback = at::RecordFunctionCallback(empty_start, on_outputs);
  set(now.outputs, on, callback.scopes({at::RecordScope::FUNCTION}).needsOutputs(true));
  outputs_watched = on;
}

}  // namespace

void install_op_callbacks(OpCallbacks which) {
  restart_learning(which == OpCallbacks::recording);
  watch_departures_of_ops();
  Installed& now = installed();
  const std::lock_guard lock(now.mutex);
  set_calls(now, false, false);
  set_outputs(now, false);
  now.records = which == OpCallbacks::recording || which == OpCallbacks::every_step;
  if (which == OpCallbacks::empty) {
    using Scope = at::RecordScope;
    auto ops = at::RecordFunctionCallback(empty_start, empty_end);
    set(now.calls, true, ops.scopes({Scope::FUNCTION, Scope::BACKWARD_FUNCTION, Scope::USER_SCOPE}));
  } else if (now.records) {
    set_calls(now, true, true);
    set_outputs(now, true);
  }
}

void enter_or_leave_range(const char* name) noexcept try {
  static const char range = 0;  // what all of them are "called" by: they end in order
  if (!recording()) return;
  ThreadState& state = thread_state();
  prepare_recording(state);
  Frame frame;
  if (name == nullptr) {
    if (state.place.leave(&range, state.names, frame)) leave_scope(state, frame);
  } else if (!state.place.is_full()) {
    enter_scope(state, state.place.enter(&range), name);
  }
} catch (...) {
}

RunningNode::RunningNode(ThreadState& state)
    : state_(state), adopted_(!state.place.in_node() && adopt_running_node(state)) {
  if (adopted_) state.place.begin_adopted_node();
}

RunningNode::~RunningNode() {
  if (adopted_) state_.place.end_adopted_node();
}

// Reads of thread-local memory.
uint32_t autocast_flags() noexcept {
  if (!at::autocast::is_autocast_enabled(at::kCUDA)) return 0;
  return at::autocast::get_autocast_dtype(at::kCUDA) == at::kBFloat16 ? kAutocastBfloat16 : kAutocastFloat16;
}

void watch_outputs(bool on) {
  if (outputs_watched.load(std::memory_order_relaxed) == on || process_is_exiting()) return;
  Installed& now = installed();
  const std::lock_guard lock(now.mutex);
  if (now.records) set_outputs(now, on);
}

void watch_ops_as_needed() {
  if (process_is_exiting()) return;
  if (steady()) watch_outputs(false);
  Installed& now = installed();
  const std::lock_guard lock(now.mutex);
  const bool with_ops = !steady();  // asked under the lock: another thread may have left steady training meanwhile
  if (now.records && now.with_ops != with_ops) set_calls(now, true, with_ops);
}

}  // namespace oomdiag
