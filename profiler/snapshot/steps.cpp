#include "profiler/snapshot/steps.h"

#include <algorithm>
#include <map>
#include <string>

#include "profiler/event.h"
#include "profiler/snapshot/snapshot.h"
#include "profiler/whole_number.h"

// A snapshot does not say where a step ends. What does, the surest first:
//
//   Optimizer.step   PyTorch's own annotation (2.6 and later)
//   ProfilerStep#3   or another annotation that the program repeats, if most of the work lies in it
//   torch.optim      in stacks: the optimizer's allocations are over
//   backward         in stacks: after it something else is allocated by a module again
//   repetition       of a model's first place, in a program that trains nothing

namespace oomdiag {
namespace {

constexpr size_t kLeastRepeats = 4;

}  // namespace

uint64_t nanoseconds_since(int64_t start_us, int64_t time_us) {
  return time_us > start_us ? (static_cast<uint64_t>(time_us) - static_cast<uint64_t>(start_us)) * 1000 : 0;
}

StepFinder::StepFinder(const Snapshot& snapshot)
    : snapshot_(snapshot), modules_known_(std::ranges::any_of(snapshot.places, &SnapshotPlace::in_module)) {}

const SnapshotPlace& StepFinder::place(uint32_t context) const {
  return snapshot_.places[context < snapshot_.places.size() ? context : 0];
}

StepFinder::Work StepFinder::work_of(const Event& event) const {
  if (event.kind != EventKind::alloc) return Work::none;
  const SnapshotPlace& at = place(event.context);
  if (at.scope != 0) return Work::optimizer;
  return at.node != 0 ? Work::backward : Work::forward;
}

void StepFinder::take(const Event& event, int64_t start_us) {
  const auto& annotations = snapshot_.annotations;
  const auto is_before = [&](const SnapshotAnnotation& one) {
    return nanoseconds_since(start_us, one.time_us) < event.time;
  };
  bool parted = runs_.empty();
  while (positions_.size() < annotations.size() && is_before(annotations[positions_.size()])) {
    positions_.push_back(events_);
    annotated_ = true;
  }
  const Work work = work_of(event);
  if (work != Work::none) {
    const bool in_module = place(event.context).in_module;
    parted = parted || annotated_ || runs_.back().work != work || runs_.back().in_module != in_module;
    if (parted) runs_.push_back({.begin = events_, .context = event.context, .work = work, .in_module = in_module});
    annotated_ = false;
  }
  ++events_;
}

SnapshotSteps StepFinder::find() {
  positions_.resize(snapshot_.annotations.size(), events_);
  SnapshotSteps steps{.ends = by_optimizer_annotation()};
  if (steps.ends.empty()) steps.ends = by_own_annotation();
  if (steps.ends.empty()) {
    auto optimizer = after(Work::optimizer, false), backward = after(Work::backward, true);
    const bool by_backward = optimizer.empty() || backward.size() > optimizer.size() + 1;
    steps.ends = by_backward ? std::move(backward) : std::move(optimizer);
  }
  if (steps.ends.empty() && !trains()) steps.ends = by_repetition();
  steps.begins = find_begins(steps.ends);
  return steps;
}

bool StepFinder::trains() const {
  return std::ranges::any_of(runs_, [](const Run& run) { return run.work != Work::forward; });
}

std::vector<size_t> StepFinder::by_optimizer_annotation() const {
  std::vector<size_t> ends;
  for (size_t i = 0; i < positions_.size(); ++i) {
    const SnapshotAnnotation& one = snapshot_.annotations[i];
    if (one.ends && snapshot_.names[one.name].starts_with("Optimizer.step")) ends.push_back(positions_[i]);
  }
  return ends;
}

// "ProfilerStep#3" and "ProfilerStep#4" are the same; of several the first by name that holds most of the allocations.
std::vector<size_t> StepFinder::by_own_annotation() const {
  struct Scope {
    std::vector<size_t> ends;
    size_t begin = 0, events = 0;
  };
  std::map<std::string, Scope> scopes;
  for (size_t i = 0; i < positions_.size(); ++i) {
    const SnapshotAnnotation& one = snapshot_.annotations[i];
    std::string name = snapshot_.names[one.name];
    if (name.starts_with("Optimizer.")) continue;
    std::erase_if(name, is_digit);
    Scope& scope = scopes[name];
    if (!one.ends) {
      scope.begin = positions_[i];
      continue;
    }
    scope.events += positions_[i] - std::min(scope.begin, positions_[i]);
    scope.ends.push_back(positions_[i]);
  }
  for (auto& [name, scope] : scopes) {
    if (scope.ends.size() > 1 && scope.events * 2 > events_) return std::move(scope.ends);
  }
  return {};
}

// Where forward work follows such work, inside of a module if that is asked and known.
std::vector<size_t> StepFinder::after(Work work, bool in_module) const {
  const bool only_modules = in_module && modules_known_;
  std::vector<size_t> ends;
  bool open = false;
  for (const Run& run : runs_) {
    if (run.work == work) open = true;
    if (run.work != Work::forward || !open || (only_modules && !run.in_module)) continue;
    ends.push_back(run.begin);
    open = false;
  }
  return ends;
}

// Where the first place in a module comes again after something was made outside of modules: the next batch, a token. That
// alone distinguishes calls of the model from its layers, and those from a loop that fills a list.
std::vector<size_t> StepFinder::by_repetition() const {
  std::vector<size_t> ends;
  const Run* first = nullptr;
  bool outside = false;
  for (const Run& run : runs_) {
    if (run.work != Work::forward) continue;
    if (run.in_module && first == nullptr) first = &run;
    if (run.in_module && outside && first->context == run.context && &run != first) ends.push_back(run.begin);
    outside = !run.in_module;
  }
  return ends.size() + 1 < kLeastRepeats ? std::vector<size_t>() : ends;
}

// The first work in a module after each end; where no module is known, the first work at all.
std::vector<size_t> StepFinder::find_begins(const std::vector<size_t>& ends) const {
  if (ends.empty() && !modules_known_ && !trains()) return {};
  std::vector<size_t> begins;
  size_t next = 0;
  bool is_expected = true;
  for (const Run& run : runs_) {
    for (; next < ends.size() && ends[next] <= run.begin; ++next) is_expected = true;
    if (!is_expected || run.work != Work::forward || (modules_known_ && !run.in_module)) continue;
    begins.push_back(run.begin);
    is_expected = false;
  }
  return begins;
}

}  // namespace oomdiag
