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
#include "extension/record/python.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"

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

// The first word of a node is the address of its table of virtual functions, before which the type lies: steady.cpp tells kinds
// of nodes by it.
void check_node_type(const torch::autograd::Node& node) {
  const void* const* table = nullptr;
  std::memcpy(&table, &node, sizeof table);
  if (table[-1] == &typeid(node)) return;
  note_missing(InternalName::node_type);
  restart_learning(false);
}

void claim_nodes(ThreadState& state) {
  const uint64_t next = at::sequence_number::peek();
  if (next <= state.claimed) [[likely]]
    return;
  Event event = state.event(EventKind::nodes_created);
  if (state.node_sequence < kNoNode) {
    event.address = state.node_sequence + 1;
    event.detail = state.node_thread;
  }
  event.node_sequence = state.claimed;
  event.node_thread = state.thread_of_nodes;
  event.bytes = static_cast<int64_t>(next - state.claimed);
  state.claimed = next;
  if (event.node_thread != ThreadNumbers::kUnnumbered) {
    learn(state, event);
    session().writer().write(event);
  }
  if (state.context.node == 0) session().steps().note_forward();
}

Frame& push_frame(ThreadState& state, const void* call) {
  Frame& frame = state.frames[state.depth++];
  frame.call = call;
  frame.outside = state;
  frame.is_outermost = frame.is_builtin = frame.is_accumulate = frame.is_optimizer_step = frame.runs_node = false;
  frame.scope_name = 0;
  return frame;
}

void go_back_to(ThreadState& state, const Frame& frame) { static_cast<WorkPlace&>(state) = frame.outside; }

// Calls may end out of order: what is open inside of the frame stays open, and is no longer inside of it when it ends. An op that
// opened scopes ends before them where ops are dispatched in Python (record_function() under a TorchDispatchMode).
void take_out(ThreadState& state, uint32_t index, const Frame& ended) {
  Frame* const inside = state.frames + index;
  Frame* const end = state.frames + state.depth;
  std::move(inside + 1, end, inside);
  inside->outside = ended.outside;
  const bool opened_scopes = ended.is_outermost && ended.scope_name == 0 && !ended.runs_node &&
                             std::all_of(inside, end - 1, [](const Frame& frame) { return frame.scope_name != 0; });
  if (!opened_scopes) return;
  const auto leave_op = [&](WorkPlace& place) {
    place.context.op = ended.outside.context.op;
    place.context.inner = ended.outside.context.inner;
    place.context.flags = ended.outside.context.flags;
    place.context_id = state.names.context(place.context);
    place.op_serial = ended.outside.op_serial;
  };
  std::for_each(inside + 1, end - 1, [&](Frame& frame) { leave_op(frame.outside); });
  leave_op(state);
}

// False for a call that began before recording did: it has no frame.
bool remove_frame(ThreadState& state, const void* call, Frame& frame) {
  uint32_t at = state.depth;
  while (at > 0 && state.frames[at - 1].call != call) --at;
  if (at == 0) return false;
  frame = state.frames[at - 1];
  if (at == state.depth) {
    go_back_to(state, frame);
  } else {
    take_out(state, at - 1, frame);
  }
  --state.depth;
  return true;
}

// Recording stopped inside of the call: it may go on some day, and then nothing must be left of it.
void forget_frame(const at::RecordFunction& call) {
  Frame frame;
  if (ThreadState* state = existing_thread_state(); state != nullptr) remove_frame(*state, &call, frame);
}

// Steady training ended in the middle of a node, which has no frame: the op that starts in it would pass for a forward op.
// True if there is one; what adopts it counts as the node for as long as it lasts.
bool adopt_running_node(ThreadState& state) {
  const auto node = torch::autograd::get_current_node();
  if (!node) [[likely]]
    return false;
  state.context.node = state.names.name(std::string_view(node->name()));
  state.node_sequence = node->sequence_nr();
  state.node_thread = ThreadNumbers::of_node(node->thread_id());
  join_graph_task(state, state.running_nodes(), torch::autograd::get_current_graph_task_id(), node.get());
  return true;
}

void enter_outermost_op(ThreadState& state, Frame& frame, uint32_t name, bool is_differentiated) {
  frame.is_outermost = true;
  if (state.node_sequence == kNoNode) frame.runs_node = adopt_running_node(state);
  if (frame.runs_node) count_unentered_node(state.node_sequence);
  if (!outputs_watched.load(std::memory_order_relaxed) && session().near_the_limit()) watch_outputs(true);
  state.context.op = name;
  state.op_serial = session().next_serial();
  session().steps().note_op();
  if (is_differentiated) state.context.flags |= kGradMode;
  state.context.flags |= autocast_flags();
  const bool forward = state.node_sequence == kNoNode;
  if (!forward && is_differentiated) state.context.flags |= kRecomputation;
  // Inside PyTorch's own scopes (an optimizer's step) the line is that of the scope.
  if ((forward || is_differentiated) && state.context.scope == 0) locate_in_python(state.context, state.places);
}

/// `known` may be null: the op was not called from this place before.
void enter_op(ThreadState& state, Frame& frame, const char* name, const at::RecordFunction& call,
              const KnownCall* known) {
  KnownCall now{.text = name, .outside = state.context_id};
  now.name = known != nullptr ? known->name : state.names.name(now.text);
  now.is_builtin = known != nullptr ? known->is_builtin : std::string_view(now.text).starts_with("aten::");
  frame.is_builtin = now.is_builtin;
  if (state.context.op == 0) enter_outermost_op(state, frame, now.name, call.seqNr() >= 0);
  state.context.inner = now.name;
  if (frame.is_outermost) {
    state.context_id = state.names.context(state.context);
  } else if (known != nullptr && known->inside != 0) {
    state.context_id = known->inside;
  } else {
    state.context_id = state.names.inner_context(now.outside, state.context);
    if (now.outside != 0) now.inside = state.context_id;
  }
  if (known == nullptr && is_registered(call)) state.calls.add(now);
}

void enter_node(ThreadState& state, Frame& frame, std::string_view name) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return;
  if (!node_was_entered.load(std::memory_order_relaxed) && !node_was_entered.exchange(true)) check_node_type(*node);
  session().steps().note_backward();
  frame.is_outermost = true;
  frame.is_accumulate = name.ends_with("AccumulateGrad");
  const InternCache::Node known = state.names.node(name);
  state.context = {.node = known.name};
  state.context_id = known.context;
  state.op_serial = session().next_serial();
  state.node_sequence = node->sequence_nr();
  state.node_thread = ThreadNumbers::of_node(node->thread_id());
  const size_t level = state.running_nodes();
  frame.runs_node = true;
  enter_graph_task(state, level, torch::autograd::get_current_graph_task_id(), node.get());
}

std::string_view tell_path(std::string_view path) {
  const std::string_view told = session().scope_names().told_as(path);
  if (told != path) session().writer().header().folded_names.fetch_add(1, std::memory_order_relaxed);
  return told;
}

void enter_scope(ThreadState& state, Frame& frame, std::string_view name) {
  const ScopeName& scope = state.scopes.find(name, session().scope_names(), state.names);
  if (scope.of_profiler) return;
  if (scope.is_folded()) session().writer().header().folded_names.fetch_add(1, std::memory_order_relaxed);
  frame.scope_name = scope.id;
  frame.is_optimizer_step = scope.is_optimizer_step;
  if (!steady() && scope.of_optimizer) meet_optimizer();
  state.outer_paths.push_back(state.module_path);
  const LearnedScope* const expected = steady() ? repeat_scope(state, frame.scope_name) : nullptr;
  if (expected != nullptr) {
    state.context.source = expected->context.source;
    state.context.inner_source = expected->context.inner_source;
  }
  if (scope.of_pytorch) {
    if (state.context.scope == 0 && expected == nullptr) locate_in_python(state.context, state.places);
    state.context.scope = frame.scope_name;
  } else {
    if (state.context.module == 0) state.module_path.clear();
    state.module_path += (state.module_path.empty() ? "" : ".") + scope.told;
    state.context.module = state.names.name(tell_path(state.module_path));
  }
  const bool is_known = expected != nullptr && expected->context == state.context;
  state.context_id = is_known ? expected->context_id : state.names.context(state.context);
  Event event = state.event(EventKind::scope_begin);
  event.detail = frame.scope_name;
  if (expected == nullptr) learn(state, event);
  session().writer().write(event);
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
  if (!recording()) return nullptr;
  ThreadState& state = thread_state();
  if (state.depth != 0 && state.frames[state.depth - 1].call == &call) return nullptr;  // told twice: set_calls()
  prepare_recording(state);
  if (state.surprise.written != nullptr) [[unlikely]]
    settle_surprise(state);
  if (!steady()) claim_nodes(state);
  look_for_saved_tensor_hooks();
  if (state.depth == ThreadState::kMaxDepth) {
    session().writer().header().deep_calls.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  Frame& frame = push_frame(state, &call);
  const char* name = call.name();
  const bool is_scope = call.scope() == at::RecordScope::USER_SCOPE;
  if (state.surprise.is_open) [[unlikely]]
    go_on_in_surprise(state, name);
  const KnownCall* const known = is_scope ? nullptr : state.calls.find(name, state.context_id);
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
  return state.depth != 0 && state.frames[state.depth - 1].is_builtin;
}

// An OOM leaves the op that it came up in as an exception, one of C++ or where that op is written in Python one of
// Python's, or the op absorbed it: cuDNN catches its own and takes a slower plan.
void settle_refusal(ThreadState& state) {
  state.refused = false;
  if (std::uncaught_exceptions() == 0 && !python_raises()) return;
  Event event = state.refusal;
  event.kind = EventKind::op_failed;
  event.time = read_ticks();
  event.address = event.detail = 0;
  session().writer().write(event);
}

void leave_scope(ThreadState& state, const Frame& frame) {
  if (!state.outer_paths.empty()) {
    state.module_path = std::move(state.outer_paths.back());
    state.outer_paths.pop_back();
  }
  Event event = state.event(EventKind::scope_end);
  event.detail = frame.scope_name;
  session().writer().write(event);
  if (frame.is_optimizer_step) session().steps().note_optimizer_step();
  if (frame.is_optimizer_step || !steady()) session().writer().mark_time();
  resume_collecting();
}

// True if it is to be told now which tensors are of which parameter group, which is noted: where it may be the peak's, and again
// before that is overwritten.
bool claim_telling_of_groups() {
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
  if (state.depth == 0) return;
  const Frame& top = state.frames[state.depth - 1];
  if (top.call == &call && top.is_plain() && !state.refused) [[likely]] {
    --state.depth;
    return go_back_to(state, top);
  }
  const Context inside = state.context;
  const uint32_t inside_id = state.context_id;
  Frame frame;
  if (!remove_frame(state, &call, frame)) return;
  if (frame.is_accumulate && !state.refused) note_accumulated_gradient(state, inside);
  if (state.refused && frame.scope_name == 0 && !runs_inside_of_builtin_op(state)) settle_refusal(state);
  if (frame.is_optimizer_step && claim_telling_of_groups()) write_parameter_groups(false);
  if (frame.scope_name != 0) leave_scope(state, frame);
  if (frame.is_optimizer_step) end_of_step(state, inside_id);
}

void on_outputs(const at::RecordFunction& call, at::ObserverContext*) {
  if (call.seqNr() >= 0 && recording()) thread_state().newest_nodes.remember(call.outputs());
}

std::unique_ptr<at::ObserverContext> empty_start(const at::RecordFunction&) { return nullptr; }
void empty_end(const at::RecordFunction&, at::ObserverContext*) {}

/// Handles are 0 where a callback is not there. There are as few as can be, since PyTorch copies the list of all of them at
/// each node of a backward pass (ThreadLocalState): ops and scopes have one, and one that is not wanted is not only disabled.
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
  // First the new one: a scope that begins in between is told twice, and is not lost.
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
    if (remove_frame(state, &range, frame)) leave_scope(state, frame);
  } else if (state.depth < ThreadState::kMaxDepth) {
    enter_scope(state, push_frame(state, &range), name);
  }
} catch (...) {
}

RunningNode::RunningNode(ThreadState& state)
    : state_(state), adopted_(state.node_sequence == kNoNode && adopt_running_node(state)) {
  state.node_adopted = adopted_;
}

RunningNode::~RunningNode() {
  if (!adopted_) return;
  state_.node_adopted = false;
  state_.context.node = 0;
  state_.node_sequence = kNoNode;
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
