#include <algorithm>
#include <utility>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/device_follower.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/trace/event_log.h"

// What a DeviceFollower keeps while it follows the events: the live set at the failure, or at the highest point so far, and
// the steps of which one will be described block by block.

namespace oomdiag {

void DeviceFollower::turn_step(uint32_t ended, uint64_t index) {
  stats_.end_step(ended);
  places_.end_step(ended);
  if (has_failed_) return;
  end_step(index);
  if (pass_.phases.step() != 0) step_.begin(pass_.phases.step(), index, living_, pass_.table, pass_.graphs);
}

uint64_t DeviceFollower::next_stop() const {
  const StatePoint& point = result_.point;
  if (point.failed && !has_failed_) return std::min(point.event, point.state_end);
  return is_marked_ ? kNoEvent : point.state_end;
}

void DeviceFollower::stop(uint64_t index) {
  StatePoint& point = result_.point;
  const EventLog& events = pass_.trace.events;
  if (point.failed && !has_failed_ && index >= point.event) {
    point.phase = pass_.phases.phase_of(events[point.event]);
    step_.end(observed_until(index), pass_.table);
    has_failed_ = true;
  }
  if (is_marked_ || index < point.state_end) return;
  if (point.failed && index < events.size() && events[index].kind == EventKind::segment_state) {
    const auto layout = events.slice(index, point.description_end, kMaxLayoutEvents);
    stats_.check_layout(layout);
    adopt(layout, index);
  }
  mark(index);
}

bool DeviceFollower::begins_own_traversal(uint64_t index) const {
  const StatePoint& point = result_.point;
  return own_traversal_ && !own_traversed_ && index >= point.event && index < point.description_end;
}

void DeviceFollower::note_traversal(uint64_t index) {
  step_.note_traversal();
  own_traversed_ = own_traversed_ || begins_own_traversal(index);
  if (is_marked_ && own_traversal_ == own_traversed_) saving_nodes_.note_traversal(pass_.graphs);
}

FollowedDevice DeviceFollower::finish() {
  const uint64_t index = pass_.trace.events.size();
  stop(index);
  stats_.finish();
  choose_steps(index);
  read_live_set();
  if (pass_.trace.process.snapshot) finish_fates();
  result_.history.curves = places_.finish(pass_.trace, pass_.nodes);
  return std::move(result_);
}

void DeviceFollower::note_peak(uint64_t index) {
  if (result_.point.failed) return;
  const uint64_t end = std::min<uint64_t>(index + 1, pass_.trace.events.size());
  result_.point = {.event = index, .state_end = end, .description_end = end, .phase = result_.history.peak.phase};
  mark(end);
}

// The live set is what is in use now; what it had before is not asked for.
void DeviceFollower::mark(uint64_t index) {
  is_marked_ = true;
  blocks_.mark();
  marked_.drop_all(pass_.table);
  marked_before_ = pass_.table.next_number();
  result_.live_set.observed = observed_until(index);
  saving_nodes_.begin(result_.point.phase, own_traversal_, pass_.graphs);
  if (own_traversed_) saving_nodes_.note_traversal(pass_.graphs);
}

void DeviceFollower::read_live_set() {
  const Blocks blocks = blocks_.marked();
  LiveSet& live_set = result_.live_set;
  live_set.allocated_bytes = blocks.allocated_bytes();
  live_set.pending_bytes = blocks.pending_bytes();
  live_set.reserved_bytes = blocks.reserved_bytes();
  live_set.blocks = blocks.in_use();
  std::sort(live_set.blocks.begin(), live_set.blocks.end(), [](auto& a, auto& b) { return a.address < b.address; });
  for (const Block& block : live_set.blocks) live_set.allocations.push_back(block.tag);
  for (const auto& segment : blocks.by_segment()) live_set.segments.push_back(lay_out(segment));
  saving_nodes_.finish(pass_.table, live_set);
}

// Step 1 makes gradients and optimizer state only as it goes: a later step that comes as near to the peak as makes no
// difference tells more.
bool DeviceFollower::is_like_peak() const {
  const Peak& peak = result_.history.peak;
  return peak.step == 1 && step_.step() > 1 && typical_.step() == 0 &&
         blocks_.allocated_bytes() >= peak.allocated_bytes / 1000 * 999;
}

// Of the step that has ended is kept what a later one can not make needless.
void DeviceFollower::end_step(uint64_t index) {
  if (step_.step() == 0) return;
  step_.end(observed_until(index), pass_.table);
  StepCollector* place = nullptr;
  if (result_.point.failed || step_.step() == result_.history.peak.step) place = &kept_;
  if (place == nullptr && is_typical_) place = &typical_;
  is_typical_ = false;
  if (place == nullptr) return step_.drop(pass_.table);
  place->drop(pass_.table);
  std::swap(*place, step_);
}

// After an OOM the step that it ended, and the one before; else that of the peak.
void DeviceFollower::choose_steps(uint64_t index) {
  if (result_.point.failed) {
    result_.step = std::move(step_);
    result_.complete = std::move(kept_);
    return;
  }
  end_step(index);
  const bool typical = result_.history.peak.step == 1 && typical_.step() != 0;
  result_.step = std::move(typical ? typical_ : kept_);
}

ObservationWindow DeviceFollower::observed_until(uint64_t index) const {
  const StatePoint& point = result_.point;
  ObservationWindow observed{.end = index, .named_end = index, .optimizer_open_since = pass_.optimizer_open_since};
  if (!point.failed) return observed;
  observed.unwound = point.event;
  if (index < point.event) return observed;
  observed.end = point.event;
  observed.named_end = point.description_end;
  observed.failed_op = pass_.trace.events[point.event].call_id;
  return observed;
}

bool DeviceFollower::has_own_traversal() const {
  const StatePoint& point = result_.point;
  if (!point.failed) return false;
  for (auto at = pass_.trace.events.from(point.event); at != pass_.trace.events.end(); ++at) {
    if (at.index() >= point.description_end) break;
    if (at->kind == EventKind::graph_begin) return true;
  }
  return false;
}

}  // namespace oomdiag
