#pragma once

#include <cstdint>
#include <vector>

#include "profiler/trace/event_log.h"

namespace oomdiag {

/// Where the events of one chunk of a trace lie.
struct ChunkExtent {
  uint64_t slot = 0;  ///< of the first one
  uint64_t count = 0;
  uint64_t first_sequence = 0, last_sequence = 0;
  bool dense = true;  ///< no sequence is missing in between, and every event is sound
};

/// The events of a trace in order.
struct EventOrder {
  std::vector<EventRun> runs;
  std::vector<SequenceStart> starts;
  uint64_t size = 0;
  uint64_t after_last_hole = 0;  ///< index of the event before which a sequence is missing, the last such; 0 = none
};

/// A sequence missing among the newest ones is no gap: threads are killed while they write.
inline constexpr uint64_t kTornEvents = 64;

/// Whether an event can be used: its kind is one, its device is one of `devices` (of any, where that is 0).
bool is_sound(const Event& event, uint32_t devices);

/// Merges `chunks`, in each of which sequences ascend, by sequence. Unsound events are left out. Reads only where chunks
/// overlap in time, as those of threads that take turns do.
EventOrder merge_chunks(EventFile& file, std::vector<ChunkExtent> chunks, uint32_t devices);

/// `order` without its first `count` events.
EventOrder drop_front(EventOrder order, uint64_t count);

}  // namespace oomdiag
