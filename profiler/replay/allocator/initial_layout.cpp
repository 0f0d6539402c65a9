#include "profiler/replay/allocator/initial_layout.h"

#include "profiler/event.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/trace/event_log.h"

namespace oomdiag {
namespace {

bool is_part(const Event& event) {
  const bool state = event.kind == EventKind::segment_state || event.kind == EventKind::block_state;
  return state && (event.flags & kBeforeRecording) != 0;
}

}  // namespace

// Written under the GPU's lock: no other event of this GPU lies between, but events of other GPUs may.
std::vector<Event> find_initial_layout(const EventLog& events, uint64_t index) {
  const Event first = events[index];
  if (first.kind != EventKind::segment_state || !is_part(first)) return {};
  for (uint64_t i = index; i-- > 0;) {
    const Event before = events[i];
    if (before.device != first.device) continue;
    if (is_part(before)) return {};  // the middle of a run
    break;
  }
  uint64_t end = index + 1;
  for (auto at = events.from(end); at != events.end(); ++at) {
    if (at->device != first.device) continue;
    if (!is_part(*at)) break;
    end = at.index() + 1;
  }
  return events.slice(index, end, kMaxLayoutEvents);
}

}  // namespace oomdiag
