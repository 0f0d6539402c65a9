#include "profiler/replay/allocations/memory_state.h"

#include <algorithm>

#include "profiler/replay/non_pytorch/non_pytorch.h"

namespace oomdiag {
namespace {

// After an OOM the allocator's own layout follows, where the observer could take it: that is the state to describe.
uint64_t find_layout(const Trace& trace, const OutOfMemory& failure) {
  for (auto at = trace.events.from(failure.event); at != trace.events.end() && at.index() <= failure.end; ++at) {
    if (at->kind == EventKind::segment_state && at->device == failure.device) return at.index();
  }
  return failure.event;
}

// The reading of free memory that tells most about the instant: at an OOM the allocator asked, else the newest one before,
// else the first after.
std::optional<OutsideReading> find_reading(const Trace& trace, const Measured& measured, const Instant& instant,
                                           int64_t total_bytes, int64_t reserved_bytes) {
  if (instant.failed) {
    const auto free = static_cast<int64_t>(std::min<uint64_t>(trace.events[instant.event].address, kMaxSaneBytes));
    return OutsideReading{instant.description_end, total_bytes - free - reserved_bytes};
  }
  if (measured.outside.empty()) return std::nullopt;
  OutsideReading reading = measured.outside.front();
  for (const OutsideReading& next : measured.outside) {
    if (next.event <= instant.event) reading = next;
  }
  return reading;
}

// Who holds what others have of the card. Between the reading and the instant only what is known may have changed, so what
// is unexplained at the one is unexplained at the other.
void describe_outside(const Trace& trace, const Measured& measured, const Instant& instant, int64_t total_bytes,
                      const Device& device, Moment& moment) {
  const auto known_before = [&](const OutsideState& state) {
    auto owners = list_owners(state, moment.segments);
    if (!state.steps.empty() || device.context_bytes <= 0) return owners;
    owners.insert(owners.begin(), {"context", "device", std::min(device.context_bytes, kMaxSaneBytes)});
    return owners;
  };
  const OutsideState state = read_outside(trace, measured.outside_events, instant.description_end);
  moment.outside = known_before(state);
  moment.host_memory = list_host_owners(state);
  moment.page_locked = list_page_locked(trace, state);
  const int64_t known = sum_of(moment.outside);
  int64_t outside = known;
  if (const auto reading = find_reading(trace, measured, instant, total_bytes, moment.reserved_bytes)) {
    const OutsideState then = read_outside(trace, measured.outside_events, reading->event);
    outside = reading->outside_bytes + known - sum_of(known_before(then));
  }
  moment.outside_bytes = std::clamp<int64_t>(outside, 0, total_bytes - moment.reserved_bytes);
  moment.free_bytes = total_bytes - moment.reserved_bytes - moment.outside_bytes;
  moment.outside.push_back({"unexplained", "", moment.outside_bytes - known});
}

}  // namespace

Instant find_instant(const Trace& trace, const DeviceHistory& history) {
  const auto device = static_cast<uint8_t>(history.index);
  if (!history.failure) {
    const uint64_t after = history.peak.at_start ? 0 : history.peak.event + 1;
    const uint64_t end = std::min<uint64_t>(after, trace.events.size());
    return {device, history.peak.event, end, end, false, history.peak.phase};
  }
  const OutOfMemory& failure = *history.failure;
  return {device, failure.event, find_layout(trace, failure), failure.end + 1, true, failure.phase};
}

std::vector<LiveBlock> describe_blocks(const Trace& trace, const Views& views, const Cut& cut, const NodeTable& nodes) {
  const RowReader reader(trace, nodes, views.table, cut.rows, cut.horizon);
  std::vector<LiveBlock> blocks;
  for (size_t b = 0; b < cut.blocks.size(); ++b) {
    const Block& block = cut.blocks[b];
    const Row& row = views.table[cut.rows[b]];
    const auto& savers = cut.savers[b];
    const uint32_t shape = row.shape != 0 || savers.empty() ? row.shape : savers.front().shape;
    const std::string_view name = trace.name(row.name);
    blocks.push_back({.address = block.address,
                      .bytes = block.bytes,
                      .requested_bytes = block.requested_bytes,
                      .category = reader.category_of(row, !savers.empty()),
                      .phase = row.phase,
                      .step = row.step,
                      .pending_free = block.state == Block::State::pending_free,
                      .before_recording = !row.is_known(),
                      .made = reader.made_of(row),
                      .name = name.empty() && !row.is_known() ? "before recording" : name,
                      .shape = trace.name(shape),
                      .group = trace.name(row.group),
                      .trained = row.trained,
                      .saved_by = reader.locate_savers(savers)});
  }
  return blocks;
}

Moment read_moment(const Trace& trace, const Measured& measured, const NodeTable& nodes, const Views& views,
                   const Cut& cut) {
  const DeviceHistory& history = measured.history;
  const auto index = static_cast<size_t>(history.index);
  const Device device = index < trace.devices.size() ? trace.devices[index] : Device{};
  const Instant instant = find_instant(trace, history);
  Moment moment{.event = instant.event,
                .step = history.failure ? history.failure->step : history.peak.step,
                .phase = instant.phase,
                .allocated_bytes = cut.allocated_bytes,
                .pending_free_bytes = cut.pending_bytes,
                .reserved_bytes = cut.reserved_bytes,
                .saved_by_likeness = cut.saved_by_likeness,
                .blocks = describe_blocks(trace, views, cut, nodes),
                .segments = cut.segments};
  if (instant.event < trace.events.size() && (history.failure || !history.peak.at_start)) {
    moment.time_ns = trace.time_ns(trace.events[instant.event]);
    moment.where = locate(trace, nodes, trace.events[instant.event]);
  }
  const int64_t total = std::max(device.total_bytes, moment.reserved_bytes);
  describe_outside(trace, measured, instant, total, device, moment);
  return moment;
}

}  // namespace oomdiag
