#pragma once

#include <cstdint>
#include <vector>

#include "profiler/event.h"
#include "profiler/snapshot/snapshot.h"

namespace oomdiag {

/// Where the steps of a snapshot's program lie among its events.
struct SnapshotSteps {
  std::vector<size_t> ends{};    ///< ascending: a step ends before the event with this index
  std::vector<size_t> begins{};  ///< likewise: the forward pass of a step begins

  bool operator==(const SnapshotSteps&) const = default;
};

/// Finds the steps of a snapshot's program. Of millions of events it keeps where the kind of work changes.
class StepFinder {
 public:
  explicit StepFinder(const Snapshot& snapshot);

  /// Takes the next event, in the order of time, which is in nanoseconds since `start_us`; `context` is the index of its
  /// place.
  void take(const Event& event, int64_t start_us);
  SnapshotSteps find();

 private:
  /// What the stacks say of an event.
  enum class Work : uint8_t { none, forward, backward, optimizer };
  /// Allocations of one kind that follow each other. An annotation between two of them parts them.
  struct Run {
    size_t begin = 0;  ///< index of the first one
    uint32_t context = 0;
    Work work = Work::none;
    bool in_module = false;
  };

  const SnapshotPlace& place(uint32_t context) const;
  Work work_of(const Event& event) const;
  bool trains() const;
  std::vector<size_t> by_optimizer_annotation() const;
  std::vector<size_t> by_own_annotation() const;
  std::vector<size_t> after(Work work, bool in_module) const;
  std::vector<size_t> by_repetition() const;
  std::vector<size_t> find_begins(const std::vector<size_t>& ends) const;

  const Snapshot& snapshot_;
  bool modules_known_;
  size_t events_ = 0;
  std::vector<size_t> positions_;  ///< before which event each annotation lies
  bool annotated_ = false;         ///< an annotation came since the last run's newest event
  std::vector<Run> runs_;
};

/// Nanoseconds from `start_us` on.
uint64_t nanoseconds_since(int64_t start_us, int64_t time_us);

}  // namespace oomdiag
