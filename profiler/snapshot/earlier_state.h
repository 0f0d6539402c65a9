#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/settings.h"
#include "profiler/snapshot/snapshot.h"

namespace oomdiag {

/// A card's segments and blocks in use, walked backwards through its history.
class EarlierState {
 public:
  EarlierState(const AllocatorSettings& settings, std::span<const SnapshotSegment> segments, int device);

  /// Goes back to before `entry`, or all of them.
  void undo(const Event& entry);
  void undo(const EventLog& entries);

  /// The state as segment_state and block_state events.
  std::vector<Event> layout() const;
  /// The blocks in use as alloc events; `context` is the index of their place.
  std::vector<Event> blocks() const;

 private:
  struct Range {
    int64_t bytes = 0;
    uint64_t stream = 0;
    bool large = true, expandable = false;
  };

  void add_range(uint64_t address, Range range);
  void remove_range(uint64_t address, int64_t bytes);

  AllocatorSettings settings_;
  uint8_t device_;
  std::map<uint64_t, Range> ranges_;          ///< segments, or mapped pieces of expandable ones; by address
  std::map<uint64_t, SnapshotBlock> blocks_;  ///< in use, by address
};

}  // namespace oomdiag
