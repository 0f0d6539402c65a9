#pragma once

#include <atomic>
#include <cstring>

#include "profiler/event.h"
#include "profiler/trace/fences.h"

namespace oomdiag {

/// Writes `event` to a place in the mapped file such that a reader, also after a SIGKILL in between, sees either a whole
/// event or none: the sequence is taken away first and given last.
inline void store_event(Event& place, const Event& event) noexcept {
  std::atomic_ref<uint64_t> sequence(place.sequence);
  sequence.store(0, std::memory_order_relaxed);
  order_stores();
  std::memcpy(reinterpret_cast<char*>(&place) + sizeof(uint64_t),
              reinterpret_cast<const char*>(&event) + sizeof(uint64_t), sizeof(Event) - sizeof(uint64_t));
  sequence.store(event.sequence, std::memory_order_release);
}

}  // namespace oomdiag
