#include "profiler/snapshot/steps.h"

#include <algorithm>
#include <map>
#include <string>

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

/// What the stacks say of an event.
enum class Work : uint8_t { none, forward, backward, optimizer };

class StepFinder {
 public:
  StepFinder(std::span<const Event> events, const Snapshot& snapshot, std::span<const size_t> positions)
      : events_(events),
        snapshot_(snapshot),
        positions_(positions),
        modules_known_(std::ranges::any_of(snapshot.places, &SnapshotPlace::in_module)) {}

  SnapshotSteps find() const {
    SnapshotSteps steps{.ends = by_optimizer_annotation()};
    if (steps.ends.empty()) steps.ends = by_own_annotation();
    if (steps.ends.empty()) {
      auto optimizer = by_optimizer(), backward = by_backward();
      steps.ends = backward.size() > optimizer.size() + 1 ? std::move(backward) : std::move(optimizer);
      if (steps.ends.empty()) steps.ends = std::move(backward);
    }
    if (steps.ends.empty() && !trains()) steps.ends = by_repetition();
    steps.begins = find_begins(steps.ends);
    return steps;
  }

 private:
  const SnapshotPlace& place(const Event& event) const {
    return snapshot_.places[event.context < snapshot_.places.size() ? event.context : 0];
  }
  Work work_of(const Event& event) const {
    if (event.kind != EventKind::alloc) return Work::none;
    const SnapshotPlace& at = place(event);
    if (at.scope != 0) return Work::optimizer;
    return at.node != 0 ? Work::backward : Work::forward;
  }
  bool trains() const {
    return std::ranges::any_of(events_, [&](const Event& event) {
      return work_of(event) == Work::backward || work_of(event) == Work::optimizer;
    });
  }

  std::vector<size_t> by_optimizer_annotation() const {
    std::vector<size_t> ends;
    for (size_t i = 0; i < positions_.size(); ++i) {
      const SnapshotAnnotation& one = snapshot_.annotations[i];
      if (one.ends && snapshot_.names[one.name].starts_with("Optimizer.step")) ends.push_back(positions_[i]);
    }
    return ends;
  }

  // "ProfilerStep#3" and "ProfilerStep#4" are the same; of several the first by name that holds most of the allocations.
  std::vector<size_t> by_own_annotation() const {
    struct Scope {
      std::vector<size_t> ends;
      size_t begin = 0, events = 0;
    };
    std::map<std::string, Scope> scopes;
    for (size_t i = 0; i < positions_.size(); ++i) {
      const SnapshotAnnotation& one = snapshot_.annotations[i];
      std::string name = snapshot_.names[one.name];
      if (name.starts_with("Optimizer.")) continue;
      std::erase_if(name, [](char c) { return c >= '0' && c <= '9'; });
      Scope& scope = scopes[name];
      if (!one.ends) {
        scope.begin = positions_[i];
        continue;
      }
      scope.events += positions_[i] - std::min(scope.begin, positions_[i]);
      scope.ends.push_back(positions_[i]);
    }
    for (auto& [name, scope] : scopes) {
      if (scope.ends.size() > 1 && scope.events * 2 > events_.size()) return std::move(scope.ends);
    }
    return {};
  }

  std::vector<size_t> by_optimizer() const { return after(Work::optimizer, false); }
  std::vector<size_t> by_backward() const { return after(Work::backward, true); }

  // Where forward work follows such work, inside of a module if that is asked and known.
  std::vector<size_t> after(Work work, bool in_module) const {
    const bool only_modules = in_module && modules_known_;
    std::vector<size_t> ends;
    bool open = false;
    for (size_t i = 0; i < events_.size(); ++i) {
      const Work now = work_of(events_[i]);
      if (now == work) open = true;
      if (now != Work::forward || !open || (only_modules && !place(events_[i]).in_module)) continue;
      ends.push_back(i);
      open = false;
    }
    return ends;
  }

  // Where the first place in a module comes again after something was made outside of modules: the next batch, a token. That
  // alone tells calls of the model from its layers, and those from a loop that fills a list.
  std::vector<size_t> by_repetition() const {
    std::vector<size_t> ends;
    const Event* first = nullptr;
    bool outside = false;
    for (size_t i = 0; i < events_.size(); ++i) {
      if (work_of(events_[i]) != Work::forward) continue;
      const bool in_module = place(events_[i]).in_module;
      if (in_module && first == nullptr) first = &events_[i];
      if (in_module && outside && first->context == events_[i].context && &events_[i] != first) ends.push_back(i);
      outside = !in_module;
    }
    return ends.size() + 1 < kLeastRepeats ? std::vector<size_t>() : ends;
  }

  // The first work in a module after each end; where no module is known, the first work at all.
  std::vector<size_t> find_begins(const std::vector<size_t>& ends) const {
    if (ends.empty() && !modules_known_ && !trains()) return {};
    std::vector<size_t> begins;
    size_t next = 0;
    bool wanted = true;
    for (size_t i = 0; i < events_.size(); ++i) {
      for (; next < ends.size() && ends[next] <= i; ++next) wanted = true;
      if (!wanted || work_of(events_[i]) != Work::forward || (modules_known_ && !place(events_[i]).in_module)) continue;
      begins.push_back(i);
      wanted = false;
    }
    return begins;
  }

  std::span<const Event> events_;
  const Snapshot& snapshot_;
  std::span<const size_t> positions_;
  bool modules_known_;
};

}  // namespace

SnapshotSteps find_steps(std::span<const Event> events, const Snapshot& snapshot,
                         std::span<const size_t> annotation_positions) {
  return StepFinder(events, snapshot, annotation_positions).find();
}

}  // namespace oomdiag
