#include "extension/record/learned_step.h"

#include <algorithm>
#include <utility>

#include "profiler/trace/mix.h"

namespace oomdiag {

namespace {

constexpr uint32_t kMostEventsOfStep = 1 << 18;  // of a step: 16 MiB of script
constexpr uint32_t kStepsBetweenChecks = 64;     // one step in so many is watched in full again
constexpr uint32_t kMostRepeatsNeeded = 1024;    // after many surprises
constexpr int kMostOtherSteps = 16;  // other optimizers' steps before one of them takes over as the end of a step

constexpr uint32_t high(uint64_t both) noexcept { return static_cast<uint32_t>(both >> 32); }
constexpr uint32_t low(uint64_t both) noexcept { return static_cast<uint32_t>(both); }
constexpr uint64_t join(uint32_t number, uint64_t count) noexcept { return uint64_t{number} << 32 | count; }

bool is_like(const Event& event, const Event& expected) noexcept {
  return event.kind == expected.kind && event.bytes == expected.bytes && event.detail == expected.detail &&
         event.device == expected.device && event.flags == expected.flags && event.time == expected.time &&
         event.node_sequence == expected.node_sequence && event.node_thread == expected.node_thread;
}

bool is_note(const Event& event) noexcept {
  return event.kind == EventKind::gradient || event.kind == EventKind::nodes_created;
}

}  // namespace

void StepLearner::restart(bool wanted) noexcept {
  const std::lock_guard lock(mutex_);
  mode_.store(TrainingMode::learning);
  repeats_needed_.store(2);
  learned_ = {};
  wanted_.store(wanted);
}

void StepLearner::add(StepOfThread& thread) {
  const std::lock_guard lock(mutex_);
  threads_.push_back(&thread);
}

void StepLearner::remove(StepOfThread& thread) {
  const std::lock_guard lock(mutex_);
  std::erase(threads_, &thread);
}

/// The first event of a thread in a step.
void StepLearner::follow_step(StepOfThread& mine, const Moment& now) noexcept {
  const uint32_t step = step_.load(std::memory_order_acquire);
  if (high(mine.progress_.load(std::memory_order_relaxed)) == step) [[likely]]
    return;
  const bool steps = mine.thread_ == stepping_thread_.load(std::memory_order_relaxed);
  mine.first_node_ = steps ? first_node_.load(std::memory_order_relaxed) : now.claimed;
  mine.hash_.store(0, std::memory_order_relaxed);
  mine.progress_.store(join(step, 0), std::memory_order_relaxed);
  const uint32_t recording = recording_.load(std::memory_order_relaxed);
  if (mode() != TrainingMode::recording || high(mine.learned_.load(std::memory_order_relaxed)) == recording) return;
  mine.script_.clear();
  mine.scopes_.clear();
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

const Event* StepLearner::expected(const StepOfThread& mine) const noexcept {
  const uint32_t next = low(mine.progress_.load(std::memory_order_relaxed));
  return next < script_size(mine) ? &mine.script_[next] : nullptr;
}

// Numbers grow from step to step: what repeats is their distance from the step's begin.
Event StepLearner::counted_from_begin(const StepOfThread& mine, Event event) const noexcept {
  if (event.op_serial != 0) event.op_serial -= first_serial_.load(std::memory_order_relaxed);
  const bool own = event.node_thread == mine.thread_;
  if (event.node_sequence < kNoNode) {
    event.node_sequence -= own ? mine.first_node_ : first_node_.load(std::memory_order_relaxed);
  }
  event.sequence = event.time = event.address = 0;
  return event;
}

void StepLearner::place(const StepOfThread& mine, Event& event, const Event& like) const noexcept {
  const bool own = like.node_thread == mine.thread_;
  event.context = like.context;
  event.op_serial = like.op_serial == 0 ? 0 : like.op_serial + first_serial_.load(std::memory_order_relaxed);
  event.node_sequence = like.node_sequence;
  if (like.node_sequence < kNoNode) {
    event.node_sequence += own ? mine.first_node_ : first_node_.load(std::memory_order_relaxed);
  }
  event.node_thread = like.node_thread;
}

void StepLearner::prepare(StepOfThread& mine, const Moment& now) {
  if (mode() != TrainingMode::recording || is_of_step(mine)) return;
  const uint32_t count = low(mine.progress_.load(std::memory_order_relaxed));  // of its last step
  follow_step(mine, now);
  mine.script_.reserve(std::min(count, kMostEventsOfStep));
}

void StepLearner::learn(StepOfThread& mine, const Event& event, const Moment& now, const Context& scope) noexcept {
  follow_step(mine, now);
  const Event relative = counted_from_begin(mine, event);
  const uint64_t mark = is_note(event) ? 0 : mix(now.mark, now.next_node - mine.first_node_);
  uint64_t hash = mine.hash_.load(std::memory_order_relaxed);
  hash = mix(hash, static_cast<uint64_t>(relative.bytes) << 8 | static_cast<uint64_t>(relative.kind));
  hash = mix(hash, static_cast<uint64_t>(relative.context) << 32 | relative.op_serial);
  hash = mix(hash, relative.node_sequence ^ relative.detail << 1);
  hash = mix(hash, mark ^ relative.flags);
  // Nodes of third threads are numbered by counters of their own: such a step is never taken for a repetition. The same goes
  // for a step in which the allocator refused something.
  const bool foreign = event.node_sequence < kNoNode && event.node_thread != mine.thread_ &&
                       event.node_thread != stepping_thread_.load(std::memory_order_relaxed);
  if (foreign || event.kind == EventKind::out_of_memory) hash = mix(hash, event.time);
  mine.hash_.store(hash, std::memory_order_relaxed);
  const uint64_t progress = mine.progress_.load(std::memory_order_relaxed);
  mine.progress_.store(progress + 1, std::memory_order_relaxed);
  const uint32_t recording = recording_.load(std::memory_order_relaxed);
  if (mode() != TrainingMode::recording || script_size(mine) != low(progress)) return;  // not all of it
  if (high(mine.learned_.load(std::memory_order_relaxed)) != recording) return;
  if (mine.script_.size() == mine.script_.capacity()) return;
  mine.script_.push_back(relative);
  mine.script_.back().time = mark;
  mine.script_.back().address = address_in_script(mine, event, scope);
  mine.learned_.store(join(recording, mine.script_.size()), std::memory_order_relaxed);
}

/// What `script_` says of addresses. `event` is the last of the script.
uint64_t StepLearner::address_in_script(StepOfThread& mine, const Event& event, const Context& scope) {
  if (event.kind == EventKind::scope_begin) {
    mine.scopes_.push_back(scope);
    return mine.scopes_.size() - 1;
  }
  if (event.kind != EventKind::gradient) return event.address;
  if (mine.looked_at_ == 0) mine.newest_.clear();
  const auto key = [](const Event& of) { return of.address << 5 | of.device; };  // blocks lie 512 bytes apart
  for (; mine.looked_at_ + 1 < mine.script_.size(); ++mine.looked_at_) {
    const Event& before = mine.script_[mine.looked_at_];
    if (before.kind == EventKind::alloc) mine.newest_[key(before)] = mine.looked_at_;
  }
  const auto found = mine.newest_.find(key(event));
  return found == mine.newest_.end() ? StepOfThread::kElsewhere : found->second;
}

bool StepLearner::repeat(StepOfThread& mine, Event& event, const Moment& now) noexcept {
  follow_step(mine, now);
  const Event* like = expected(mine);
  if (like == nullptr) return false;
  Event relative = counted_from_begin(mine, event);
  relative.time = mix(now.mark, now.next_node - mine.first_node_);
  if (!is_like(relative, *like)) return false;
  place(mine, event, *like);
  const uint64_t progress = mine.progress_.load(std::memory_order_relaxed);
  mine.script_[low(progress)].address = event.address;
  __builtin_prefetch(like + 1, 1);  // it is long out of the cache when the next event comes
  __builtin_prefetch(like + 2, 1);
  mine.progress_.store(progress + 1, std::memory_order_relaxed);
  mine.nodes_ = now.next_node;
  return true;
}

const Context* StepLearner::repeat_scope(StepOfThread& mine, uint32_t name, const Moment& now) noexcept {
  follow_step(mine, now);
  const Event* like = expected(mine);
  if (like == nullptr || like->kind != EventKind::scope_begin || like->detail != name) return nullptr;
  if (like->time != mix(now.mark, now.next_node - mine.first_node_)) return nullptr;
  mine.progress_.store(mine.progress_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return &mine.scopes_[like->address];
}

std::optional<Event> StepLearner::next_note(StepOfThread& mine, const Moment& now) noexcept {
  follow_step(mine, now);
  for (const Event* like = expected(mine); like != nullptr && is_note(*like); like = expected(mine)) {
    mine.progress_.store(mine.progress_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    const bool is_gradient = like->kind == EventKind::gradient;
    if (is_gradient && like->address == StepOfThread::kElsewhere) continue;  // known since it was made
    Event event = *like;
    event.address = is_gradient ? mine.script_[like->address].address : 0;
    event.time = 0;
    place(mine, event, *like);
    return event;
  }
  return std::nullopt;
}

bool StepLearner::leave() noexcept {
  auto mode = TrainingMode::steady;
  if (!mode_.compare_exchange_strong(mode, TrainingMode::learning)) return false;
  repeats_needed_.store(std::min(repeats_needed_.load() * 2, kMostRepeatsNeeded));
  return true;
}

uint64_t StepLearner::first_unsure_node(const StepOfThread& mine, const Moment& now) const noexcept {
  return std::min(now.claimed, is_of_step(mine) ? std::max(mine.nodes_, mine.first_node_) : now.claimed);
}

uint64_t StepLearner::signature_of_step(uint64_t nodes, uint32_t serials) const {
  uint64_t sum = mix(mix(1, nodes), serials);
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
  const bool is_new = learned_.boundary == 0 || learned_.other_steps >= kMostOtherSteps;
  if (is_new) learned_.boundary = context;
  learned_.other_steps = context == learned_.boundary ? 0 : learned_.other_steps + 1;
  return context == learned_.boundary;
}

bool StepLearner::end_step(StepOfThread& mine, const End& end) {
  const std::lock_guard lock(mutex_);
  if (!wanted() || !is_boundary(end.context)) return false;
  const bool was_steady = steady();
  const uint64_t nodes = end.next_node - first_node_.load(std::memory_order_relaxed);
  const uint32_t serials = end.serials.load(std::memory_order_relaxed) - first_serial_.load(std::memory_order_relaxed);
  if (was_steady) {
    judge_steady_step(nodes, end.grows);
  } else {
    const uint64_t signature = signature_of_step(nodes, serials);
    judge_watched_step(signature == learned_.signature, end.grows);
    learned_.signature = signature;
    learned_.nodes = nodes;
    learned_.serials = serials;
  }
  const uint32_t skipped = steady() ? learned_.serials : 0;
  stepping_thread_.store(mine.thread_, std::memory_order_relaxed);
  first_serial_.store(end.serials.fetch_add(skipped, std::memory_order_relaxed), std::memory_order_relaxed);
  first_node_.store(end.next_node, std::memory_order_relaxed);
  step_.fetch_add(1, std::memory_order_release);
  return was_steady != steady();
}

}  // namespace oomdiag
