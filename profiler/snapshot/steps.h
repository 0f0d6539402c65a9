#pragma once

#include <cstdint>
#include <span>
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

/// Finds the steps of `events`, in the order of time; `context` is the index of their place. `annotation_positions`:
/// before which events the snapshot's annotations lie, in their order.
SnapshotSteps find_steps(std::span<const Event> events, const Snapshot& snapshot,
                         std::span<const size_t> annotation_positions);

}  // namespace oomdiag
