#include "extension/record/steady.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <string>
#include <typeinfo>
#include <utility>

#include "extension/record/learned_step.h"
#include "extension/record/native_stack.h"
#include "extension/record/op_callbacks.h"
#include "extension/record/python.h"
#include "extension/record/session.h"
#include "extension/record/thread_numbers.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/trace/ticks.h"

namespace oomdiag {

namespace {

// Two places that differ in nothing of this are one to us: the Python calls that run, with the modules that they are of, the
// kind of autograd node, and how many nodes the step has made.
[[gnu::hot]] ThreadMark look(const ThreadState& state, const torch::autograd::Node* node) noexcept {
  uint64_t type = 0;
  if (node != nullptr)
    std::memcpy(&type, node, sizeof type);  // its table of virtual functions: one read instead of three
  return {.mark = mark_of_python_calls() ^ type, .next_node = at::sequence_number::peek(), .claimed = state.next_node};
}
ThreadMark look(const ThreadState& state) noexcept { return look(state, torch::autograd::get_current_node().get()); }

/// For what needs no mark.
ThreadMark count(const ThreadState& state) noexcept {
  return {.mark = 0, .next_node = at::sequence_number::peek(), .claimed = state.next_node};
}

/// Which autograd node an event belongs to, if the op callbacks have not set it.
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
  const ThreadMark now = count(state);
  const uint64_t sure = session().learner().first_unsure_node(state.training, now);
  state.next_node = now.next_node;
  write_nodes(state, state.event(EventKind::nodes_created), sure, now.next_node);
}

/// Writes the nodes_created and gradients that follow in the learned step, up to the next allocation, read or scope.
[[gnu::hot]] void repeat_notes(ThreadState& state, ThreadMark& now, uint64_t time) noexcept {
  StepLearner& learner = session().learner();
  if (!learner.note_is_due(state.training, now)) return;
  for (Event note; learner.next_note(state.training, now, note);) {
    note.time = time;
    if (note.kind == EventKind::nodes_created) {
      now.claimed = note.node_sequence + static_cast<uint64_t>(note.bytes);
      state.next_node = now.claimed;
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

// What a graph keeps is looked at in steps that are watched. What counts is where it was when more was alive than ever.
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

// A thread that comes in the middle of steady training has no state yet, since no callback has seen it.
ThreadState* state_of_newcomer() noexcept try { return &thread_state(); } catch (...) {
  return nullptr;
}

}  // namespace

bool steady() noexcept { return session().learner().steady(); }

void restart_learning(bool enable) noexcept {
  if (the_session != nullptr) the_session->learner().restart(enable && python_calls_are_distinguished());
}

void prepare_recording(ThreadState& state) {
  if (session().learner().mode() == TrainingMode::recording) session().learner().prepare(state.training, count(state));
}

void learn(ThreadState& state, const Event& event) noexcept {
  if (!session().learner().is_enabled()) return;
  const bool is_note = event.kind == EventKind::nodes_created || event.kind == EventKind::gradient;
  session().learner().learn(state.training, event, is_note ? count(state) : look(state), state.place.now().context);
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
    ThreadMark moment = look(*state, node.get());
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
  // A failed request has none: whether the op fails by it is not seen.
  if (event.call_id == 0 && event.kind == EventKind::alloc) event.call_id = now.next_call_id();
  learn(*state, event);
  now.writer().write(event);
  state->divergence.note(*state, event);
  return false;
}

const LearnedScope* repeat_scope(ThreadState& state, uint32_t name) {
  ThreadMark moment = look(state);
  repeat_notes(state, moment, read_ticks());
  const LearnedScope* const scope = session().learner().repeat_scope(state.training, name, moment);
  if (scope == nullptr) leave_steady_training(&state);
  return scope;
}

void StepDivergence::note(ThreadState& state, const Event& event) noexcept {
  written_ = event.sequence == 0 ? nullptr : session().writer().last_written();
  sequence_ = event.sequence;
  call_id_ = event.call_id;
  is_open_ = false;
  mark_ = mark_of_python_calls();
  const uint64_t next = at::sequence_number::peek();
  const bool made_one = next > session().learner().first_unsure_node(state.training, count(state));
  first_node_ = made_one ? next - 1 : next;
  context_ = state.place.now().context;
  context_.flags |= autocast_flags();
  in_grad_mode_ = at::GradMode::is_enabled();
  calls_.capture();
  stack_.capture();
  const auto node = torch::autograd::get_current_node();
  node_type_ = node ? typeid(*node).name() : nullptr;
  node_sequence_ = event.node_sequence;
}

// The engine has gone on to another node where the name is not asked for at once; a node in Python only knows its own name.
std::string StepDivergence::name_of_node() const {
  const auto node = torch::autograd::get_current_node();
  if (node && node->sequence_nr() == node_sequence_) return node->name();
  const std::string name = c10::demangle(node_type_);
  const size_t colons = name.rfind(':');
  return colons == name.npos ? name : name.substr(colons + 1);
}

// Autograd made the op's node just before the op ran, and ops are watched from here on: what is new is of that op, too.
void StepDivergence::claim_nodes(ThreadState& state, uint32_t context) const noexcept {
  Event event = state.event(EventKind::nodes_created);
  event.context = context;
  event.call_id = call_id_;
  state.next_node = at::sequence_number::peek();
  write_nodes(state, event, first_node_, state.next_node);
}

void StepDivergence::resolve(ThreadState& state) {
  Event* written = std::exchange(written_, nullptr);
  Context context = context_;
  if (written == nullptr) return;
  if (node_type_ != nullptr) context.node = state.names.name(std::string_view(name_of_node()));
  const FoundOps ops = find_ops(stack_, state.names, context);
  const bool is_differentiated = in_grad_mode_ && ops.takes_tensors;
  if (is_differentiated) context.flags |= kGradMode | (context.node != 0 ? uint32_t{kRecomputation} : 0);
  if ((context.node == 0 || is_differentiated) && context.scope == 0) locate_in_python(context, calls_);
  const uint32_t id = state.names.context(context);
  session().writer().place(written, sequence_, id);
  if (context.node == 0 && is_differentiated) claim_nodes(state, id);
  is_open_ = context.op != 0 && context.node == 0 && mark_ != 0;
  context_ = context;
  state.oom.place(sequence_, id);
}

void StepDivergence::resume(ThreadState& state, const char* name) {
  const bool is_next_call = state.names.name(name) == context_.op;
  is_open_ = !is_next_call && mark_ == mark_of_python_calls();
  WorkPlace& now = state.place.change();
  if (!is_open_ || now.context.op != 0 || state.place.in_node()) return;
  now.context = context_;
  now.context_id = state.names.context(context_);
  now.call_id = call_id_;
}

void end_of_step(ThreadState& state, uint32_t context) {
  StepLearner& learner = session().learner();
  const bool changed = learner.end_step(state.training, {.context = context,
                                                         .next_node = at::sequence_number::peek(),
                                                         .call_ids = session().call_ids(),
                                                         .grows = grew_in_this_step(session())});
  session().writer().header().steady_steps.store(learner.steady_steps(), std::memory_order_relaxed);
  if (changed) watch_ops_as_needed();
}

}  // namespace oomdiag
