#pragma once

#include <cstdint>
#include <vector>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"

namespace oomdiag {

/// What was not yet read of one chunk of a trace.
struct UnreadChunk {
  uint64_t sequence = 0;  ///< of the next event, or a smaller one
  uint64_t slot = 0;      ///< where that lies
  uint64_t slots = 0;     ///< from there to the chunk's end

  auto operator<=>(const UnreadChunk&) const = default;
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

/// Merges `chunks` by sequence. A chunk was written up to an event that is not later than the one before, left over from the
/// chunk's last use, or to one after `last_sequence`. Unsound events are left out. Reads each event once.
EventOrder merge_chunks(EventFile& file, const std::vector<UnreadChunk>& chunks, uint64_t last_sequence,
                        uint32_t devices);

/// `order` without its first `count` events.
EventOrder drop_front(EventOrder order, uint64_t count);

}  // namespace oomdiag
