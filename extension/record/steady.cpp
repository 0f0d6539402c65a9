#include "extension/record/steady.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <string>
#include <typeinfo>
#include <utility>

#include "extension/record/op_callbacks.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"

namespace oomdiag {

namespace {

// Two places that differ in nothing of this are one to us: the Python calls that run, with the modules that they are of, the
// kind of autograd node, and how many nodes the step has made.
[[gnu::hot]] Moment look(const ThreadState& state, const torch::autograd::Node* node) noexcept {
  uint64_t type = 0;
  if (node != nullptr)
    std::memcpy(&type, node, sizeof type);  // its table of virtual functions: one read instead of three
  return {.mark = mark_of_python_calls() ^ type, .next_node = at::sequence_number::peek(), .claimed = state.claimed};
}
Moment look(const ThreadState& state) noexcept { return look(state, torch::autograd::get_current_node().get()); }

/// For what needs no mark.
Moment count(const ThreadState& state) noexcept {
  return {.mark = 0, .next_node = at::sequence_number::peek(), .claimed = state.claimed};
}

/// Which autograd node an event belongs to, if the op callbacks have not told.
void place_in_backward(Event& event, const torch::autograd::Node* node) noexcept {
  if (node == nullptr) return;
  event.node_sequence = node->sequence_nr();
  event.node_thread = ThreadNumbers::of_node(node->thread_id());
}

void write_nodes(ThreadState& state, Event event, uint64_t first, uint64_t end) noexcept {
  if (first >= end || state.thread_of_nodes == ThreadNumbers::kUnnumbered) return;
  event.node_sequence = first;
  event.node_thread = state.thread_of_nodes;
  event.bytes = static_cast<int64_t>(end - first);
  session().writer().write(event);
}

// Which op made the nodes since the last allocation is not known: that much is said of them.
void disown_nodes(ThreadState& state) noexcept {
  const Moment now = count(state);
  const uint64_t sure = session().learner().first_unsure_node(state.training, now);
  state.claimed = now.next_node;
  write_nodes(state, state.event(EventKind::nodes_created), sure, now.next_node);
}

// Autograd made the op's node just before the op ran, and ops are watched from here on: what is new is of that op, too.
void claim_nodes_of(ThreadState& state, const Surprise& surprise, uint32_t context) {
  Event event = state.event(EventKind::nodes_created);
  event.context = context;
  event.op_serial = surprise.op_serial;
  state.claimed = at::sequence_number::peek();
  write_nodes(state, event, surprise.first_node, state.claimed);
}

/// Writes the nodes_created and gradients that follow in the learned step, up to the next allocation, read or scope.
[[gnu::hot]] void repeat_notes(ThreadState& state, Moment& now, uint64_t time) noexcept {
  StepLearner& learner = session().learner();
  if (!learner.note_is_due(state.training, now)) return;
  for (Event note; learner.next_note(state.training, now, note);) {
    note.time = time;
    if (note.kind == EventKind::nodes_created) {
      now.claimed = state.claimed = note.node_sequence + static_cast<uint64_t>(note.bytes);
    }
    session().writer().write(note);
  }
}

// PyTorch's own lock of the list of callbacks is taken in it, under which nothing else is taken.
void leave_steady_training(ThreadState* state) noexcept try {
  if (!session().learner().leave()) return;
  if (state != nullptr) disown_nodes(*state);
  watch_ops_as_needed();
} catch (...) {
}

void note_surprise(ThreadState& state, const Event& event) noexcept {
  Surprise& surprise = state.surprise;
  surprise.written = event.sequence == 0 ? nullptr : session().writer().last_written();
  surprise.sequence = event.sequence;
  surprise.op_serial = event.op_serial;
  surprise.is_open = false;
  surprise.mark = mark_of_python_calls();
  const uint64_t next = at::sequence_number::peek();
  const bool made_one = next > session().learner().first_unsure_node(state.training, count(state));
  surprise.first_node = made_one ? next - 1 : next;
  surprise.context = state.context;
  surprise.context.flags |= autocast_flags();
  surprise.in_grad_mode = at::GradMode::is_enabled();
  surprise.calls.capture();
  surprise.stack.capture();
  const auto node = torch::autograd::get_current_node();
  surprise.node_type = node ? typeid(*node).name() : nullptr;
  surprise.node_sequence = event.node_sequence;
}

// The engine has gone on to another node where the name is not asked for at once; a node in Python only knows its own name.
std::string name_of_node(const Surprise& surprise) {
  const auto node = torch::autograd::get_current_node();
  if (node && node->sequence_nr() == surprise.node_sequence) return node->name();
  const std::string name = c10::demangle(surprise.node_type);
  const size_t colons = name.rfind(':');
  return colons == name.npos ? name : name.substr(colons + 1);
}

// What a graph keeps is looked at in steps that are watched. Where it was when more was alive than ever is wanted.
bool is_clearly_above(int64_t bytes, int64_t before) { return bytes - before > before >> 10; }

void note_backward_of_steady_step(Session& now, const Event& event) noexcept {
  const uint32_t step = now.learner().step();
  if (event.node_sequence == kNoNode || now.backward_of_step.load(std::memory_order_relaxed) == step) return;
  now.backward_of_step.store(step, std::memory_order_relaxed);
  const int64_t highest = now.highest_walked.load(std::memory_order_relaxed);
  if (is_clearly_above(now.live_bytes(), highest)) now.walk_is_due.store(true, std::memory_order_relaxed);
}

bool grew_in_this_step(Session& now) {
  if (now.learner().steady()) return now.walk_is_due.exchange(false);
  const int64_t highest = now.highest_walked.load(std::memory_order_relaxed);
  return is_clearly_above(highest, now.highest_when_judged.exchange(highest));
}

// A thread that comes in the middle of steady training has no state yet, since no callback has met it.
ThreadState* state_of_newcomer() noexcept try { return &thread_state(); } catch (...) {
  return nullptr;
}

}  // namespace

bool steady() noexcept { return session().learner().steady(); }

void restart_learning(bool wanted) noexcept {
  if (the_session != nullptr) the_session->learner().restart(wanted && python_calls_are_told_apart());
}

void prepare_recording(ThreadState& state) {
  if (session().learner().mode() == TrainingMode::recording) session().learner().prepare(state.training, count(state));
}

void learn(ThreadState& state, const Event& event) noexcept {
  if (!session().learner().wanted()) return;
  const bool is_note = event.kind == EventKind::nodes_created || event.kind == EventKind::gradient;
  session().learner().learn(state.training, event, is_note ? count(state) : look(state), state.context);
}

[[gnu::hot]] bool write_in_step(ThreadState* state, Event& event) noexcept {
  Session& now = session();
  if (!steady()) {
    if (state != nullptr) learn(*state, event);
    now.writer().write(event);
    return true;
  }
  const auto node = torch::autograd::get_current_node();
  place_in_backward(event, node.get());
  note_backward_of_steady_step(now, event);
  if (state != nullptr) {
    Moment moment = look(*state, node.get());
    repeat_notes(*state, moment, event.time);
    if (now.learner().repeat(state->training, event, moment)) {
      now.writer().write(event);
      repeat_notes(*state, moment, event.time);
      return true;
    }
  }
  if (state == nullptr) state = state_of_newcomer();
  leave_steady_training(state);
  if (state == nullptr) {
    now.writer().write(event);
    return false;
  }
  event.thread = state->thread;
  // A refused request has none: whether the op fails by it is not seen.
  if (event.op_serial == 0 && event.kind == EventKind::alloc) event.op_serial = now.next_serial();
  learn(*state, event);
  now.writer().write(event);
  note_surprise(*state, event);
  return false;
}

const LearnedScope* repeat_scope(ThreadState& state, uint32_t name) {
  Moment moment = look(state);
  repeat_notes(state, moment, read_ticks());
  const LearnedScope* const scope = session().learner().repeat_scope(state.training, name, moment);
  if (scope == nullptr) leave_steady_training(&state);
  return scope;
}

void settle_surprise(ThreadState& state) {
  Surprise& surprise = state.surprise;
  Event* written = std::exchange(surprise.written, nullptr);
  Context context = surprise.context;
  if (written == nullptr) return;
  if (surprise.node_type != nullptr) context.node = state.names.name(std::string_view(name_of_node(surprise)));
  const FoundOps ops = find_ops(surprise.stack, state.names, context);
  const bool is_differentiated = surprise.in_grad_mode && ops.takes_tensors;
  if (is_differentiated) context.flags |= kGradMode | (context.node != 0 ? uint32_t{kRecomputation} : 0);
  if ((context.node == 0 || is_differentiated) && context.scope == 0) locate_in_python(context, surprise.calls);
  const uint32_t id = state.names.context(context);
  session().writer().place(written, surprise.sequence, id);
  if (context.node == 0 && is_differentiated) claim_nodes_of(state, surprise, id);
  surprise.is_open = context.op != 0 && context.node == 0 && surprise.mark != 0;
  surprise.context = context;
  if (state.refusal.sequence == surprise.sequence) state.refusal.context = id;
}

void go_on_in_surprise(ThreadState& state, const char* name) {
  Surprise& surprise = state.surprise;
  const bool is_next_call = state.names.name(name) == surprise.context.op;
  surprise.is_open = !is_next_call && surprise.mark == mark_of_python_calls();
  if (!surprise.is_open || state.context.op != 0 || state.node_sequence != kNoNode) return;
  state.context = surprise.context;
  state.context_id = state.names.context(state.context);
  state.op_serial = surprise.op_serial;
}

void end_of_step(ThreadState& state, uint32_t context) {
  StepLearner& learner = session().learner();
  const bool changed = learner.end_step(state.training, {.context = context,
                                                         .next_node = at::sequence_number::peek(),
                                                         .serials = session().serials(),
                                                         .grows = grew_in_this_step(session())});
  session().writer().header().steady_steps.store(learner.steady_steps(), std::memory_order_relaxed);
  if (changed) watch_ops_as_needed();
}

}  // namespace oomdiag
