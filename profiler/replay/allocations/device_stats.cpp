#include "profiler/replay/allocations/device_stats.h"

#include <algorithm>
#include <cstdlib>
#include <map>

#include "profiler/event.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/phases.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

DeviceStats::DeviceStats(const Trace& trace, uint8_t device, Blocks& blocks, FollowedDevice& result)
    : trace_(trace),
      device_(device),
      whole_(trace.overwritten_events == 0 && trace.initial.empty()),
      blocks_(blocks),
      result_(result) {
  result_.used = blocks_.allocated_bytes() > 0;
  history().index = device;
  history().reserved_known = whole_ || !trace.initial_layout.empty();
  history().peak.allocated_bytes = blocks_.allocated_bytes();
  history().peak.reserved_bytes = blocks_.reserved_bytes();
  history().peak.at_start = !whole_;
  if (trace.process.snapshot) history().peak.phase = Phase::other;
}

bool DeviceStats::note_alloc(const Event& event, uint64_t index, uint32_t step, Phase phase, const NodeTable& nodes) {
  peak_since_mark_ = std::max(peak_since_mark_, blocks_.allocated_bytes());
  phase_peaks_.add(step, phase, blocks_.allocated_bytes());
  int64_t& highest = history().phase_peaks[static_cast<size_t>(phase)];
  highest = std::max(highest, blocks_.allocated_bytes());
  if (phase == Phase::backward && event.bytes == sane_bytes(event.bytes)) attribute(event, nodes);
  return raise_peak(index, step, phase);
}

bool DeviceStats::raise_peak(uint64_t index, uint32_t step, Phase phase) {
  Peak& peak = history().peak;
  if (blocks_.allocated_bytes() <= peak.allocated_bytes) return false;
  peak = {blocks_.allocated_bytes(), peak.reserved_bytes, index, step, phase};
  return true;
}

void DeviceStats::note_oom(const Event& event, const Phases& phases, const NodeTable& nodes, OutOfMemory oom) {
  oom.step = phases.step();
  oom.phase = phases.phase_of(event);
  oom.where = locate(trace_, nodes, event);
  const bool is_of_forward = event.call_id != 0 && !in_node(event) && !trace_.process.snapshot;
  oom.no_grad = is_of_forward && (trace_.context(event.context).flags & kGradMode) == 0;
  oom.requested_bytes = sane_bytes(event.bytes);
  oom.pool = pool_of(event.flags);
  oom.allocated_bytes = blocks_.allocated_bytes();
  oom.reserved_bytes = blocks_.reserved_bytes();
  oom.free_bytes = sane_bytes(event.address);
  history().ooms.push_back(oom);
  if (oom.outcome == Outcome::fatal) history().failure = oom;
  result_.used = true;
}

void DeviceStats::check_stats(const Event& event) {
  if (trace_.process.unwatched) return take_totals(event);
  if (!whole_) {
    blocks_.set_reserved_bytes(sane_bytes(event.address));
    history().reserved_known = true;
    history().counted_peak_bytes = sane_bytes(event.node_sequence);
  }
  note_error(sane_bytes(event.bytes) - blocks_.allocated_bytes());
  note_error(sane_bytes(event.address) - blocks_.reserved_bytes());
}

// The allocator reported nothing of its blocks: what it counted itself is all there is.
void DeviceStats::take_totals(const Event& event) {
  result_.used = true;
  history().peak.allocated_bytes = sane_bytes(event.node_sequence);
  history().peak.reserved_bytes = sane_bytes(event.detail);
}

void DeviceStats::read_device_memory(const Event& event, uint64_t index) {
  const int64_t outside = sane_bytes(event.bytes) - sane_bytes(event.address) - blocks_.reserved_bytes();
  newest_reading_ = {index, std::max<int64_t>(0, outside)};
  if (NonPytorchReading* const next = readings_.next()) *next = newest_reading_;
}

bool DeviceStats::check_layout(std::span<const Event> layout) {
  Blocks reported(parse_allocator_settings(trace_.process.allocator_settings));
  reported.adopt(layout, device_);
  const int64_t difference = reported.allocated_bytes() - blocks_.allocated_bytes();
  note_error(difference);
  const bool same_reserved = history().reserved_known && reported.reserved_bytes() == blocks_.reserved_bytes();
  history().reserved_known = true;
  return difference == 0 && same_reserved;
}

bool DeviceStats::note_initial_layout(uint64_t index, const Phases& phases) {
  whole_ = false;
  result_.used = true;
  history().reserved_known = true;
  const bool is_peak = raise_peak(index, phases.step(), Phase::setup);
  Peak& peak = history().peak;
  peak.reserved_bytes = std::max(peak.reserved_bytes, blocks_.reserved_bytes());
  timeline_.add({index, 0, blocks_.allocated_bytes(), blocks_.reserved_bytes()});
  return is_peak;
}

void DeviceStats::note_mark(const Event& event, uint32_t step) {
  constexpr size_t kMaxMarks = 1000;
  if (history().marks.size() == kMaxMarks) return;
  const int64_t now = blocks_.allocated_bytes();
  history().marks.push_back({std::string(trace_.name(event.detail)), trace_.time_ns(event), step, now,
                             blocks_.reserved_bytes(), std::max(peak_since_mark_, now)});
  peak_since_mark_ = now;
}

void DeviceStats::note_packed(const Event& event) {
  packed_in_traversal_ += static_cast<int64_t>(std::min<uint64_t>(event.detail, 1 << 20));
  history().packed_tensors = std::max(history().packed_tensors, packed_in_traversal_);
}

namespace {

CachedForStreams sum_cached_for_streams(const Blocks& blocks) {
  std::map<uint64_t, SegmentLayout> streams;
  for (const auto& segment : blocks.by_segment()) {
    const SegmentLayout layout = lay_out(segment);
    streams[layout.stream].bytes += layout.bytes;
    streams[layout.stream].used_bytes += layout.used_bytes;
  }
  CachedForStreams cached;
  const auto most = std::ranges::max_element(streams, {}, [](const auto& one) { return one.second.bytes; });
  for (auto one = streams.begin(); one != streams.end(); ++one) {
    if (one == most) continue;
    cached.bytes += one->second.bytes - one->second.used_bytes;
    ++cached.streams;
  }
  return cached;
}

}  // namespace

void DeviceStats::finish() {
  history().cached_for_streams = sum_cached_for_streams(blocks_);
  result_.non_pytorch = readings_.entries();
  if (!result_.non_pytorch.empty() && result_.non_pytorch.back().event < newest_reading_.event)
    result_.non_pytorch.push_back(newest_reading_);
  history().timeline = timeline_.finish();
  for (TimelinePoint& point : history().timeline) point.time_ns = trace_.time_ns(trace_.events[point.event]);
  history().step_ends = step_ends_.finish();
  history().phases = phase_peaks_.finish();
}

void DeviceStats::note_error(int64_t difference) {
  history().replay_error_bytes = std::max(history().replay_error_bytes, std::abs(difference));
}

void DeviceStats::attribute(const Event& event, const NodeTable& nodes) {
  Attribution& sum = history().attribution;
  if (sum.backward_bytes > kMaxBytes) return;
  sum.backward_bytes += event.bytes;
  if (!in_node(event)) return;
  sum.with_node_bytes += event.bytes;
  if (event.node_sequence == kAccumulateGrad) sum.accumulate_bytes += event.bytes;
  const auto made = nodes.find(event.node_thread, event.node_sequence);
  if (!made) return;
  sum.with_forward_op_bytes += event.bytes;
  const Context place = find_place(trace_, made, event);
  if (place.module != 0) sum.with_module_bytes += event.bytes;
  if (place.source != 0) sum.with_source_bytes += event.bytes;
}

}  // namespace oomdiag
