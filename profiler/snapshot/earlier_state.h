#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocator/address_map.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/snapshot/snapshot.h"

namespace oomdiag {

/// A GPU's segments and blocks in use at the end of its history, and once that was seen, at its beginning. What a block was
/// then the first event that names it shows it.
class EarlierState {
 public:
  EarlierState(const AllocatorSettings& settings, std::span<const SnapshotSegment> segments, int device);

  /// Takes the next event of the history.
  void see(const Event& event) {
    switch (event.kind) {
      case EventKind::alloc:
      case EventKind::free_requested:
      case EventKind::free_completed:
        return see_block(event);
      case EventKind::segment_alloc:
      case EventKind::segment_free:
      case EventKind::segment_map:
      case EventKind::segment_unmap:
        return segment_events_.push_back(event);
      default:  // nothing that changes the state
        return;
    }
  }
  /// Goes back to before all that was seen.
  void rewind();

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

  /// The first event that names a block.
  struct First {
    uint64_t address = 0;
    int64_t bytes = 0;
    EventKind kind = EventKind::none;
    bool made_later = false;  ///< by another one: what lies there at the end is not what was freed
  };

  void see_block(const Event& event) {
    uint32_t& known = first_of_[event.address];
    if (known == 0) {
      firsts_.push_back({event.address, event.bytes, event.kind});
      known = static_cast<uint32_t>(firsts_.size());
    } else if (event.kind == EventKind::alloc) {
      firsts_[known - 1].made_later = true;
    }
  }
  void undo_segment(const Event& event);
  void add_range(uint64_t address, Range range);
  void remove_range(uint64_t address, int64_t bytes);

  AllocatorSettings settings_;
  uint8_t device_;
  std::map<uint64_t, Range> ranges_;          ///< segments, or mapped pieces of expandable ones; by address
  std::map<uint64_t, SnapshotBlock> blocks_;  ///< in use, by address
  std::vector<First> firsts_;
  AddressMap<uint32_t> first_of_;      ///< 1 + the index of an address's
  std::vector<Event> segment_events_;  ///< all of them
};

}  // namespace oomdiag
