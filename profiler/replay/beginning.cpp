#include "profiler/replay/beginning.h"

namespace oomdiag {
namespace {

bool is_part(const Event& event) {
  const bool state = event.kind == EventKind::segment_state || event.kind == EventKind::block_state;
  return state && (event.flags & kBeforeRecording) != 0;
}

}  // namespace

// Written under the card's lock: no other event of this card lies between, but events of other cards may.
std::span<const Event> find_beginning(std::span<const Event> events, uint64_t index) {
  const Event& first = events[index];
  if (first.kind != EventKind::segment_state || !is_part(first)) return {};
  for (uint64_t i = index; i-- > 0;) {
    if (events[i].device != first.device) continue;
    if (is_part(events[i])) return {};  // the middle of a run
    break;
  }
  uint64_t end = index + 1;
  for (uint64_t i = end; i < events.size(); ++i) {
    if (events[i].device != first.device) continue;
    if (!is_part(events[i])) break;
    end = i + 1;
  }
  return events.subspan(index, end - index);
}

}  // namespace oomdiag
