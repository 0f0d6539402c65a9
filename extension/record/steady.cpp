#include "extension/record/steady.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include "extension/record/op_callbacks.h"
#include "extension/record/python.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"

namespace oomdiag {

std::atomic<TrainingMode> training_mode = TrainingMode::learning;

namespace {

constexpr uint32_t kMostEvents = 1 << 18;      // of a step: 16 MiB of script
constexpr uint32_t kStepsBetweenChecks = 64;   // one step in so many is watched in full again
constexpr uint32_t kMostRepeatsNeeded = 1024;  // after many surprises
constexpr int kMostOtherSteps = 16;  // other optimizers' steps before one of them takes over as the end of a step

/// The step that runs. Written where one ends, read by all threads.
std::atomic<uint32_t> current_step = 1;
std::atomic<uint32_t> first_serial = 0;  ///< op calls are counted from here
std::atomic<uint64_t> first_node = 0;    ///< nodes of the stepping thread likewise
std::atomic<uint16_t> stepping_thread = 0;
std::atomic<uint32_t> repeats_needed = 2;

/// What is known of the steps so far. Guarded by the registry's mutex.
struct Learned {
  bool wanted = true;
  uint32_t boundary = 0;  ///< context of the optimizer step that ends a step
  int other_steps = 0;
  uint64_t signature = 0;
  uint32_t repeats = 0;
  uint32_t steady_steps = 0;
  uint32_t serials = 0;  ///< op calls in a step
  uint64_t nodes = 0;    ///< nodes that the stepping thread makes in a step
} learned;

uint64_t mix(uint64_t hash, uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 29;
}

// Numbers grow from step to step: what repeats is their distance from the step's begin.
Event counted_from_begin(Event event) noexcept {
  if (event.op_serial != 0) event.op_serial -= first_serial.load(std::memory_order_relaxed);
  if (event.node_sequence < kNoNode) event.node_sequence -= first_node.load(std::memory_order_relaxed);
  event.sequence = event.time = event.address = 0;
  return event;
}

void place(Event& event, const Event& like) noexcept {
  event.context = like.context;
  event.op_serial = like.op_serial == 0 ? 0 : like.op_serial + first_serial.load(std::memory_order_relaxed);
  event.node_sequence = like.node_sequence >= kNoNode ? like.node_sequence
                                                      : like.node_sequence + first_node.load(std::memory_order_relaxed);
  event.node_thread = like.node_thread;
}

bool is_like(const Event& event, const Event& expected) noexcept {
  return event.kind == expected.kind && event.bytes == expected.bytes && event.detail == expected.detail &&
         event.device == expected.device;
}

// Which op made the nodes since the last allocation is not known: that much is said of them.
void disown_nodes(ThreadState& state) noexcept {
  const uint64_t next = at::sequence_number::peek();
  const uint64_t first = std::exchange(state.claimed, next);
  const uint64_t sure = std::min(first, state.training.nodes);
  if (sure >= next) return;
  Event event = state.event(EventKind::nodes_created);
  event.node_sequence = sure;
  event.node_thread = state.thread;
  event.bytes = static_cast<int64_t>(next - sure);
  session().writer().write(event);
}

/// What `StepOfThread::script` says of addresses. `event` is the last of the script.
uint64_t address_in_script(ThreadState& state, const Event& event) noexcept {
  StepOfThread& mine = state.training;
  if (event.kind == EventKind::scope_begin) {
    mine.scopes.push_back(state.context);
    return mine.scopes.size() - 1;
  }
  if (event.kind != EventKind::gradient) return event.address;
  for (uint64_t i = mine.script.size() - 1; i-- > 0;) {
    const Event& before = mine.script[i];
    if (before.kind == EventKind::alloc && before.address == event.address && before.device == event.device) return i;
  }
  return StepOfThread::kElsewhere;
}

// The engine has gone on to another node where the name is not asked for at once; a node in Python only knows its own name.
std::string name_of_node(const Surprise& surprise) {
  const auto node = torch::autograd::get_current_node();
  if (node && node->sequence_nr() == surprise.node_sequence) return node->name();
  const std::string name = c10::demangle(surprise.node_type);
  const size_t colons = name.rfind(':');
  return colons == name.npos ? name : name.substr(colons + 1);
}

void leave_steady_training(ThreadState* state) noexcept try {
  if (training_mode.exchange(TrainingMode::learning) != TrainingMode::steady) return;
  repeats_needed.store(std::min(repeats_needed.load() * 2, kMostRepeatsNeeded));
  if (state != nullptr && state->thread == stepping_thread.load()) disown_nodes(*state);
  watch_ops(true);  // takes PyTorch's own lock of the list of callbacks, under which nothing else is taken
} catch (...) {
}

/// The first event of a thread in a step.
void follow_step(StepOfThread& mine) noexcept {
  const uint32_t step = current_step.load(std::memory_order_acquire);
  if (mine.step.load(std::memory_order_relaxed) == step) return;
  mine.step.store(step, std::memory_order_relaxed);
  mine.count.store(0, std::memory_order_relaxed);
  mine.hash.store(0, std::memory_order_relaxed);
}

bool takes_part(const StepOfThread& thread) {
  return thread.step.load(std::memory_order_relaxed) == current_step.load(std::memory_order_relaxed);
}

uint64_t signature_of_step(uint64_t nodes, uint32_t serials) {
  uint64_t sum = mix(mix(1, nodes), serials);
  for (const ThreadState* thread : all_threads()) {
    if (!takes_part(thread->training)) continue;
    sum += mix(mix(thread->training.hash.load(std::memory_order_relaxed), thread->thread),
               thread->training.count.load(std::memory_order_relaxed));
  }
  return sum;
}

// After a step that was recorded: whether all of it was. After a steady step: whether all that was learned came.
bool steps_equal_scripts() {
  return std::ranges::all_of(all_threads(), [](const ThreadState* thread) {
    const StepOfThread& training = thread->training;
    return training.script.size() == (takes_part(training) ? training.count.load(std::memory_order_relaxed) : 0);
  });
}

void begin_step(const ThreadState& state, uint32_t serials) {
  stepping_thread.store(state.thread, std::memory_order_relaxed);
  first_serial.store(session().take_serials(serials), std::memory_order_relaxed);
  first_node.store(at::sequence_number::peek(), std::memory_order_relaxed);
  current_step.fetch_add(1, std::memory_order_release);
}

void begin_recording() {
  for (ThreadState* thread : all_threads()) {
    thread->training.script.clear();
    thread->training.scopes.clear();
  }
  training_mode.store(TrainingMode::recording);
  learned.steady_steps = 0;
}

// After a step in which ops were watched.
void judge_watched_step(bool alike) {
  const bool recorded = training_mode.load() == TrainingMode::recording;
  if (!alike) {
    learned.repeats = 0;
    training_mode.store(TrainingMode::learning);
  } else if (recorded && steps_equal_scripts()) {
    training_mode.store(TrainingMode::steady);
    watch_ops(false);
  } else if (++learned.repeats >= repeats_needed.load()) {
    begin_recording();
  }
}

void judge_steady_step(ThreadState& state, uint64_t nodes) {
  if (nodes != learned.nodes || !steps_equal_scripts()) return leave_steady_training(&state);
  session().writer().header().steady_steps.fetch_add(1, std::memory_order_relaxed);
  if (++learned.steady_steps < kStepsBetweenChecks) return;
  watch_ops(true);
  begin_recording();
}

bool is_boundary(uint32_t context) {
  const bool is_new = learned.boundary == 0 || learned.other_steps >= kMostOtherSteps;
  if (is_new) learned.boundary = context;
  learned.other_steps = context == learned.boundary ? 0 : learned.other_steps + 1;
  return context == learned.boundary;
}

}  // namespace

void restart_learning(bool wanted) noexcept {
  const std::lock_guard lock(threads_mutex());
  training_mode.store(TrainingMode::learning);
  repeats_needed.store(2);
  learned = {};
  learned.wanted = wanted;
}

void prepare_recording(ThreadState& state) {
  if (training_mode.load(std::memory_order_relaxed) != TrainingMode::recording) return;
  StepOfThread& mine = state.training;
  if (mine.step.load(std::memory_order_relaxed) == current_step.load(std::memory_order_relaxed)) return;
  mine.script.reserve(std::min(mine.count.load(std::memory_order_relaxed), kMostEvents));
  follow_step(mine);
}

void learn(ThreadState& state, const Event& event) noexcept {
  StepOfThread& mine = state.training;
  follow_step(mine);
  const Event relative = counted_from_begin(event);
  uint64_t hash = mine.hash.load(std::memory_order_relaxed);
  hash = mix(hash, static_cast<uint64_t>(relative.bytes) << 8 | static_cast<uint64_t>(relative.kind));
  hash = mix(hash, static_cast<uint64_t>(relative.context) << 32 | relative.op_serial);
  hash = mix(hash, relative.node_sequence ^ relative.detail << 1);
  // Nodes of other threads are numbered by counters of their own: such a step is never taken for a repetition.
  // The same goes for a step in which the allocator refused something.
  const bool foreign =
      event.node_sequence < kNoNode && event.node_thread != stepping_thread.load(std::memory_order_relaxed);
  if (foreign || event.kind == EventKind::out_of_memory) hash = mix(hash, event.time);
  mine.hash.store(hash, std::memory_order_relaxed);
  mine.count.store(mine.count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (training_mode.load(std::memory_order_relaxed) == TrainingMode::recording &&
      mine.script.size() < mine.script.capacity()) {
    mine.script.push_back(relative);
    mine.script.back().address = address_in_script(state, event);
  }
}

bool repeat(ThreadState* state, Event& event) noexcept {
  if (state != nullptr) {
    StepOfThread& mine = state->training;
    follow_step(mine);
    repeat_notes(*state);
    const uint32_t next = mine.count.load(std::memory_order_relaxed);
    if (next < mine.script.size() && is_like(event, mine.script[next])) {
      place(event, mine.script[next]);
      mine.script[next].address = event.address;
      mine.count.store(next + 1, std::memory_order_relaxed);
      mine.nodes = at::sequence_number::peek();
      return true;
    }
  }
  leave_steady_training(state);
  return false;
}

bool repeat_scope(ThreadState& state, uint32_t name) {
  StepOfThread& mine = state.training;
  follow_step(mine);
  repeat_notes(state);
  const uint32_t next = mine.count.load(std::memory_order_relaxed);
  if (next < mine.script.size() && mine.script[next].kind == EventKind::scope_begin &&
      mine.script[next].detail == name) {
    const Context& scope = mine.scopes[mine.script[next].address];
    state.context.source = scope.source;
    state.context.inner_source = scope.inner_source;
    mine.count.store(next + 1, std::memory_order_relaxed);
    return true;
  }
  leave_steady_training(&state);
  return false;
}

void place_in_backward(Event& event) noexcept {
  const auto node = torch::autograd::get_current_node();
  if (!node) return;
  event.node_sequence = node->sequence_nr();
  event.node_thread = static_cast<uint16_t>(node->thread_id());
}

void note_surprise(ThreadState& state, const Event& event) noexcept {
  state.surprise.written = event.sequence == 0 ? nullptr : session().writer().last_written();
  state.surprise.sequence = event.sequence;
  state.surprise.context = state.context;
  if (at::GradMode::is_enabled()) state.surprise.context.flags |= kGradMode;
  state.surprise.context.flags |= autocast_flags();
  state.surprise.stack.capture();
  const auto node = torch::autograd::get_current_node();
  state.surprise.node_type = node ? typeid(*node).name() : nullptr;
  state.surprise.node_sequence = event.node_sequence;
}

void settle_surprise(ThreadState& state, const char* running) {
  Surprise& surprise = state.surprise;
  Event* written = std::exchange(surprise.written, nullptr);
  Context context = surprise.context;
  if (written == nullptr) return;
  if (surprise.node_type != nullptr) context.node = state.names.name(std::string_view(name_of_node(surprise)));
  if (find_ops(surprise.stack, state.names, context)) {
    const bool same_call = running != nullptr && state.names.name(running) != context.op;
    if (same_call && context.scope == 0 && context.node == 0) locate_in_python(context);
  }
  const uint32_t id = state.names.context(context);
  session().writer().place(written, surprise.sequence, id);
  if (state.refusal.sequence == surprise.sequence) state.refusal.context = id;
}

void repeat_notes(ThreadState& state) noexcept {
  StepOfThread& mine = state.training;
  uint32_t next = mine.count.load(std::memory_order_relaxed);
  for (; next < mine.script.size(); ++next) {
    Event event = mine.script[next];
    const bool is_gradient = event.kind == EventKind::gradient;
    if (!is_gradient && event.kind != EventKind::nodes_created) break;
    if (is_gradient && event.address == StepOfThread::kElsewhere) continue;  // known since it was made
    event.address = is_gradient ? mine.script[event.address].address : 0;
    event.time = read_ticks();
    place(event, mine.script[next]);
    if (!is_gradient) state.claimed = event.node_sequence + static_cast<uint64_t>(event.bytes);
    session().writer().write(event);
  }
  mine.count.store(next, std::memory_order_relaxed);
}

void end_of_step(ThreadState& state, uint32_t context) {
  const std::lock_guard lock(threads_mutex());
  if (!learned.wanted || !is_boundary(context)) return;
  const uint64_t nodes = at::sequence_number::peek() - first_node.load(std::memory_order_relaxed);
  const uint32_t serials = session().last_serial() - first_serial.load(std::memory_order_relaxed);
  if (steady()) {
    judge_steady_step(state, nodes);
  } else {
    const uint64_t signature = signature_of_step(nodes, serials);
    judge_watched_step(signature == learned.signature);
    learned.signature = signature;
    learned.nodes = nodes;
    learned.serials = serials;
  }
  begin_step(state, steady() ? learned.serials : 0);
}

}  // namespace oomdiag
