#include "extension/record/learned_step.h"

#include <algorithm>
#include <utility>

#include "profiler/event.h"
#include "profiler/trace/mix.h"

namespace oomdiag {

namespace {

constexpr uint32_t kMaxEventsOfStep = 1 << 18;  // of a step: 10 MiB of script, 16 MiB of notes
constexpr uint32_t kStepsBetweenChecks = 64;    // one step in so many is watched in full again
constexpr uint32_t kMaxRepeatsNeeded = 1024;    // after many surprises
constexpr int kMaxOtherSteps = 16;  // other optimizers' steps before one of them takes over as the end of a step

constexpr uint32_t high(uint64_t both) noexcept { return static_cast<uint32_t>(both >> 32); }
constexpr uint32_t low(uint64_t both) noexcept { return static_cast<uint32_t>(both); }
constexpr uint64_t join(uint32_t number, uint64_t count) noexcept { return uint64_t{number} << 32 | count; }

bool is_note(const Event& event) noexcept {
  return event.kind == EventKind::gradient || event.kind == EventKind::nodes_created;
}

// Blocks lie 512 bytes apart.
uint64_t block_key(const Event& event) noexcept { return event.address << 5 | event.device; }

}  // namespace

void StepLearner::restart(bool enable) noexcept {
  const std::lock_guard lock(mutex_);
  mode_.store(TrainingMode::learning);
  repeats_needed_.store(2);
  learned_ = {};
  is_enabled_.store(enable);
}

void StepLearner::add(StepOfThread& thread) {
  const std::lock_guard lock(mutex_);
  threads_.push_back(&thread);
}

void StepLearner::remove(StepOfThread& thread) {
  const std::lock_guard lock(mutex_);
  std::erase(threads_, &thread);
}

void StepLearner::begin_step(StepOfThread& mine, const ThreadMark& now, uint32_t step) noexcept {
  const bool steps = mine.thread_ == stepping_thread_.load(std::memory_order_relaxed);
  mine.first_node_ = steps ? first_node_.load(std::memory_order_relaxed) : now.claimed;
  mine.next_ = mine.next_note_ = 0;
  mine.notes_due_ = script_size(mine) != 0 ? mine.first_notes_ : 0;
  mine.hash_.store(0, std::memory_order_relaxed);
  mine.progress_.store(join(step, 0), std::memory_order_relaxed);
  const uint32_t recording = recording_.load(std::memory_order_relaxed);
  if (mode() != TrainingMode::recording || high(mine.learned_.load(std::memory_order_relaxed)) == recording) return;
  mine.script_.clear();
  mine.blocks_.clear();
  mine.notes_.clear();
  mine.scopes_.clear();
  mine.newest_.clear();
  mine.first_notes_ = 0;
  mine.looked_at_ = 0;
  mine.learned_.store(join(recording, 0), std::memory_order_relaxed);
}

bool StepLearner::is_of_step(const StepOfThread& thread) const noexcept {
  return high(thread.progress_.load(std::memory_order_relaxed)) == step_.load(std::memory_order_relaxed);
}

uint32_t StepLearner::script_size(const StepOfThread& thread) const noexcept {
  const uint64_t learned = thread.learned_.load(std::memory_order_relaxed);
  return high(learned) == recording_.load(std::memory_order_relaxed) ? low(learned) : 0;
}

const Expected* StepLearner::expected(const StepOfThread& mine) const noexcept {
  return script_size(mine) != 0 && mine.next_ < mine.script_.size() ? &mine.script_[mine.next_] : nullptr;
}

// Numbers grow from step to step: what repeats is their distance from the step's begin.
uint64_t StepLearner::first_node_of(const StepOfThread& mine, uint64_t thread) const noexcept {
  return thread == mine.thread_ ? mine.first_node_ : first_node_.load(std::memory_order_relaxed);
}

uint64_t StepLearner::node_from_begin(const StepOfThread& mine, const Event& event) const noexcept {
  if (event.node_sequence >= kNoNode) return event.node_sequence;
  return event.node_sequence - first_node_of(mine, event.node_thread);
}

// Two events of equal keys are the same one of two steps: the same request, of the same kind of place in the program.
uint64_t StepLearner::key_of(const StepOfThread& mine, const Event& event, const ThreadMark& now) const noexcept {
  const uint64_t mark = mix(now.mark, now.next_node - mine.first_node_);
  const uint64_t what = static_cast<uint64_t>(event.kind) | uint64_t{event.device} << 8 | uint64_t{event.flags} << 16 |
                        uint64_t{event.node_thread} << 32;
  if (event.kind == EventKind::scope_begin) return mix(mix(mark, event.detail), static_cast<uint64_t>(event.kind));
  return mix(mix(mix(mix(mark, static_cast<uint64_t>(event.bytes)), event.detail), what), node_from_begin(mine, event));
}

void StepLearner::place(const StepOfThread& mine, Event& event, const Expected& like) const noexcept {
  event.context = like.context;
  event.call_id = like.call_id == 0 ? 0 : like.call_id + first_call_id_.load(std::memory_order_relaxed);
  event.node_sequence = like.node;
  event.node_thread = like.node_thread;
  if (like.node < kNoNode) event.node_sequence += first_node_of(mine, like.node_thread);
}

void StepLearner::prepare(StepOfThread& mine, const ThreadMark& now) {
  if (mode() != TrainingMode::recording || is_of_step(mine)) return;
  const uint32_t count = low(mine.progress_.load(std::memory_order_relaxed));  // of its last step
  follow_step(mine, now);
  mine.script_.reserve(std::min(count, kMaxEventsOfStep));
  mine.blocks_.reserve(mine.script_.capacity());  // so that where one has capacity, both have
}

void StepLearner::learn(StepOfThread& mine, const Event& event, const ThreadMark& now, const Context& scope) noexcept {
  follow_step(mine, now);
  const uint32_t call_id = event.call_id == 0 ? 0 : event.call_id - first_call_id_.load(std::memory_order_relaxed);
  const uint64_t mark = is_note(event) ? 0 : mix(now.mark, now.next_node - mine.first_node_);
  uint64_t hash = mine.hash_.load(std::memory_order_relaxed);
  hash = mix(hash, static_cast<uint64_t>(event.bytes) << 8 | static_cast<uint64_t>(event.kind));
  hash = mix(hash, static_cast<uint64_t>(event.context) << 32 | call_id);
  hash = mix(hash, node_from_begin(mine, event) ^ event.detail << 1);
  hash = mix(hash, mark ^ event.flags);
  // Nodes of third threads are numbered by counters of their own: such a step is never taken for a repetition. The same goes
  // for a step in which a request failed.
  const bool foreign = event.node_sequence < kNoNode && event.node_thread != mine.thread_ &&
                       event.node_thread != stepping_thread_.load(std::memory_order_relaxed);
  if (foreign || event.kind == EventKind::out_of_memory) hash = mix(hash, event.time);
  mine.hash_.store(hash, std::memory_order_relaxed);
  const uint64_t progress = mine.progress_.load(std::memory_order_relaxed);
  mine.progress_.store(progress + 1, std::memory_order_relaxed);
  const uint32_t recording = recording_.load(std::memory_order_relaxed);
  if (mode() != TrainingMode::recording || script_size(mine) != low(progress)) return;  // not all of it
  if (high(mine.learned_.load(std::memory_order_relaxed)) != recording) return;
  const bool has_room =
      is_note(event) ? mine.notes_.size() < kMaxEventsOfStep : mine.script_.size() < mine.script_.capacity();
  if (!has_room) return;
  if (is_note(event)) {
    record_note(mine, event);
  } else {
    record(mine, event, now, scope);
  }
  mine.learned_.store(join(recording, low(progress) + 1), std::memory_order_relaxed);
}

// There is capacity: inside the allocator nothing is allocated. Scopes do not begin there.
void StepLearner::record(StepOfThread& mine, const Event& event, const ThreadMark& now, const Context& scope) {
  const bool is_scope = event.kind == EventKind::scope_begin;
  const uint32_t call_id = event.call_id == 0 ? 0 : event.call_id - first_call_id_.load(std::memory_order_relaxed);
  mine.script_.push_back({.key = key_of(mine, event, now),
                          .node = is_scope ? mine.scopes_.size() : node_from_begin(mine, event),
                          .context = event.context,
                          .call_id = call_id,
                          .notes_end = static_cast<uint32_t>(mine.notes_.size()),
                          .node_thread = event.node_thread});
  mine.blocks_.push_back(event.kind == EventKind::alloc ? block_key(event) : 0);
  if (is_scope) mine.scopes_.push_back({scope, event.context});
}

void StepLearner::record_note(StepOfThread& mine, const Event& event) {
  const uint32_t first_call_id = first_call_id_.load(std::memory_order_relaxed);
  Event note = event;
  note.sequence = note.time = 0;
  if (note.call_id != 0) note.call_id -= first_call_id;
  note.node_sequence = node_from_begin(mine, event);
  note.address = note.kind == EventKind::gradient ? place_of_gradient(mine, event) : runner_from_begin(mine, event);
  mine.notes_.push_back(note);
  const auto end = static_cast<uint32_t>(mine.notes_.size());
  (mine.script_.empty() ? mine.first_notes_ : mine.script_.back().notes_end) = end;
}

/// What nodes_created has in its address: the node that ran the op, if it is one of the step's, else 0.
uint64_t StepLearner::runner_from_begin(const StepOfThread& mine, const Event& created) const noexcept {
  const bool is_known =
      created.detail == mine.thread_ || created.detail == stepping_thread_.load(std::memory_order_relaxed);
  const uint64_t first = first_node_of(mine, created.detail);
  return is_known && created.address > first ? created.address - first : 0;
}

uint64_t StepLearner::place_of_gradient(StepOfThread& mine, const Event& gradient) {
  for (; mine.looked_at_ < mine.blocks_.size(); ++mine.looked_at_) {
    if (const uint64_t key = mine.blocks_[mine.looked_at_]; key != 0) mine.newest_[key] = mine.looked_at_;
  }
  const auto found = mine.newest_.find(block_key(gradient));
  return found == mine.newest_.end() ? StepOfThread::kElsewhere : found->second;
}

[[gnu::hot]] bool StepLearner::repeat(StepOfThread& mine, Event& event, const ThreadMark& now) noexcept {
  follow_step(mine, now);
  const Expected* like = expected(mine);
  if (like == nullptr || like->key != key_of(mine, event, now)) return false;
  place(mine, event, *like);
  mine.notes_due_ = like->notes_end;
  uint64_t& block = mine.blocks_[mine.next_++];
  if (event.kind == EventKind::alloc) block = block_key(event);
  __builtin_prefetch(like + 2);  // it is long out of the cache when the next event comes
  __builtin_prefetch(&block + 8, 1);
  mine.progress_.store(mine.progress_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  mine.nodes_ = now.next_node;
  return true;
}

const LearnedScope* StepLearner::repeat_scope(StepOfThread& mine, uint32_t name, const ThreadMark& now) noexcept {
  follow_step(mine, now);
  const Expected* like = expected(mine);
  const Event begin{.detail = name, .kind = EventKind::scope_begin};
  if (like == nullptr || like->key != key_of(mine, begin, now)) return nullptr;
  ++mine.next_;
  mine.notes_due_ = like->notes_end;
  mine.progress_.store(mine.progress_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return &mine.scopes_[like->node];
}

[[gnu::hot]] bool StepLearner::next_note(StepOfThread& mine, const ThreadMark& now, Event& note) noexcept {
  while (note_is_due(mine, now)) {
    note = mine.notes_[mine.next_note_++];
    __builtin_prefetch(mine.notes_.data() + mine.next_note_);
    mine.progress_.store(mine.progress_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (note.kind == EventKind::gradient) {
      if (note.address == StepOfThread::kElsewhere) continue;  // known since it was made
      note.address = mine.blocks_[note.address] >> 5;
    } else if (note.address != 0) {
      note.address += first_node_of(mine, note.detail);
    }
    place(mine, note,
          {.node = note.node_sequence,
           .context = note.context,
           .call_id = note.call_id,
           .node_thread = note.node_thread});
    return true;
  }
  return false;
}

bool StepLearner::leave() noexcept {
  auto mode = TrainingMode::steady;
  if (!mode_.compare_exchange_strong(mode, TrainingMode::learning)) return false;
  repeats_needed_.store(std::min(repeats_needed_.load() * 2, kMaxRepeatsNeeded));
  return true;
}

uint64_t StepLearner::first_unsure_node(const StepOfThread& mine, const ThreadMark& now) const noexcept {
  return std::min(now.claimed, is_of_step(mine) ? std::max(mine.nodes_, mine.first_node_) : now.claimed);
}

uint64_t StepLearner::signature_of_step(uint64_t nodes, uint32_t call_ids) const {
  uint64_t sum = mix(mix(1, nodes), call_ids);
  for (const StepOfThread* thread : threads_) {
    if (!is_of_step(*thread)) continue;
    sum += mix(mix(thread->hash_.load(std::memory_order_relaxed), thread->thread_),
               low(thread->progress_.load(std::memory_order_relaxed)));
  }
  return sum;
}

// After a step that was recorded: whether all of it was. After a steady step: whether all that was learned came.
bool StepLearner::steps_equal_scripts() const {
  return std::ranges::all_of(threads_, [&](const StepOfThread* thread) {
    const uint32_t done = is_of_step(*thread) ? low(thread->progress_.load(std::memory_order_relaxed)) : 0;
    return script_size(*thread) == done;
  });
}

void StepLearner::begin_recording() {
  recording_.fetch_add(1, std::memory_order_relaxed);
  mode_.store(TrainingMode::recording);
  learned_.steady_steps = 0;
}

// After a step in which ops were watched.
void StepLearner::judge_watched_step(bool alike, bool grows) {
  const bool recorded = mode() == TrainingMode::recording;
  if (!alike) {
    learned_.repeats = 0;
    mode_.store(TrainingMode::learning);
  } else if (recorded && !grows && steps_equal_scripts()) {
    mode_.store(TrainingMode::steady);
  } else if (++learned_.repeats >= repeats_needed_.load()) {
    begin_recording();
  }
}

void StepLearner::judge_steady_step(uint64_t nodes, bool grows) {
  if (nodes != learned_.nodes || !steps_equal_scripts()) {
    leave();
    return;
  }
  steady_steps_.fetch_add(1, std::memory_order_relaxed);
  if (++learned_.steady_steps >= kStepsBetweenChecks || grows) begin_recording();
}

bool StepLearner::is_boundary(uint32_t context) {
  const bool is_new = learned_.boundary == 0 || learned_.other_steps >= kMaxOtherSteps;
  if (is_new) learned_.boundary = context;
  learned_.other_steps = context == learned_.boundary ? 0 : learned_.other_steps + 1;
  return context == learned_.boundary;
}

bool StepLearner::end_step(StepOfThread& mine, const End& end) {
  const std::lock_guard lock(mutex_);
  if (!is_enabled() || !is_boundary(end.context)) return false;
  const bool was_steady = steady();
  const uint64_t nodes = end.next_node - first_node_.load(std::memory_order_relaxed);
  const uint32_t call_ids =
      end.call_ids.load(std::memory_order_relaxed) - first_call_id_.load(std::memory_order_relaxed);
  if (was_steady) {
    judge_steady_step(nodes, end.grows);
  } else {
    const uint64_t signature = signature_of_step(nodes, call_ids);
    judge_watched_step(signature == learned_.signature, end.grows);
    learned_.signature = signature;
    learned_.nodes = nodes;
    learned_.call_ids = call_ids;
  }
  const uint32_t skipped = steady() ? learned_.call_ids : 0;
  stepping_thread_.store(mine.thread_, std::memory_order_relaxed);
  first_call_id_.store(end.call_ids.fetch_add(skipped, std::memory_order_relaxed), std::memory_order_relaxed);
  first_node_.store(end.next_node, std::memory_order_relaxed);
  step_.fetch_add(1, std::memory_order_release);
  return was_steady != steady();
}

}  // namespace oomdiag
