#include "profiler/replay/allocations/memory_state.h"

#include <algorithm>

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/evidence/allocation_reader.h"
#include "profiler/replay/evidence/backward_runs.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/non_pytorch/non_pytorch.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

// The reading of free memory that tells most about the moment: at an OOM the allocator asked, else the newest one before,
// else the first after.
std::optional<NonPytorchReading> find_reading(const Trace& trace, const FollowedDevice& measured, int64_t total_bytes,
                                              int64_t reserved_bytes) {
  const StatePoint& point = measured.point;
  if (point.failed) {
    const auto free = static_cast<int64_t>(std::min<uint64_t>(trace.events[point.event].address, kMaxSaneBytes));
    return NonPytorchReading{point.description_end, total_bytes - free - reserved_bytes};
  }
  if (measured.non_pytorch.empty()) return std::nullopt;
  NonPytorchReading reading = measured.non_pytorch.front();
  for (const NonPytorchReading& next : measured.non_pytorch) {
    if (next.event <= point.event) reading = next;
  }
  return reading;
}

// Who holds what others have of the GPU. Between the reading and the moment only what is known may have changed, so what
// is unexplained at the one is unexplained at the other.
void describe_non_pytorch(const Trace& trace, const FollowedDevice& measured, int64_t total_bytes, const Device& device,
                          MemoryState& state) {
  const auto known_before = [&](const NonPytorchState& non_pytorch) {
    auto owners = list_owners(non_pytorch, state.segments);
    if (!non_pytorch.steps.empty() || device.context_bytes <= 0) return owners;
    owners.insert(owners.begin(), {"context", "device", std::min(device.context_bytes, kMaxSaneBytes)});
    return owners;
  };
  const NonPytorchState non_pytorch =
      read_non_pytorch(trace, measured.non_pytorch_events, measured.point.description_end);
  state.non_pytorch = known_before(non_pytorch);
  state.host_memory = list_host_owners(non_pytorch);
  state.pinned_host_memory = list_pinned_host_memory(trace, non_pytorch);
  const int64_t known = sum_of(state.non_pytorch);
  int64_t outside = known;
  if (const auto reading = find_reading(trace, measured, total_bytes, state.reserved_bytes)) {
    const NonPytorchState then = read_non_pytorch(trace, measured.non_pytorch_events, reading->event);
    outside = reading->non_pytorch_bytes + known - sum_of(known_before(then));
  }
  state.non_pytorch_bytes = std::clamp<int64_t>(outside, 0, total_bytes - state.reserved_bytes);
  state.free_bytes = total_bytes - state.reserved_bytes - state.non_pytorch_bytes;
  state.non_pytorch.push_back({"unexplained", "", state.non_pytorch_bytes - known});
}

// The blocks of a live set, as people read about them, by address.
std::vector<LiveBlock> describe_blocks(const Trace& trace, const FollowedTrace& followed,
                                       const FollowedDevice& device) {
  const LiveSet& live_set = device.live_set;
  const AllocationReader reader(trace, followed.nodes, followed.table, live_set.allocations, live_set.observed);
  std::vector<LiveBlock> blocks;
  for (size_t b = 0; b < live_set.blocks.size(); ++b) {
    const Block& block = live_set.blocks[b];
    const Allocation& allocation = followed.table[live_set.allocations[b]];
    const auto& saving_nodes = live_set.saving_nodes[b];
    const std::string_view name = trace.name(allocation.name);
    const bool let_go = device.searched_at != kNoEvent && allocation.died < device.searched_at;
    blocks.push_back({.address = block.address,
                      .bytes = block.bytes,
                      .requested_bytes = block.requested_bytes,
                      .category = reader.category_of(allocation, !saving_nodes.empty()),
                      .confidence = reader.judge_by_stacks(allocation).confidence,
                      .phase = allocation.phase,
                      .step = allocation.step,
                      .pending_free = block.state == Block::State::pending_free,
                      .before_recording = !allocation.is_known(),
                      .let_go = let_go,
                      .born = allocation.born,
                      .freed = let_go ? allocation.died : 0,
                      .made = reader.made_of(allocation),
                      .name = name.empty() && !allocation.is_known() ? "before recording" : name,
                      .shape = trace.name(allocation.shape_or_saved(saving_nodes)),
                      .group = trace.name(allocation.group),
                      .trained = allocation.trained,
                      .uncalled = allocation.uncalled,
                      .context = allocation.maker.context,
                      .saved_by = reader.locate_saving_nodes(saving_nodes)});
  }
  return blocks;
}

void mark_backward_runs(const Trace& trace, const FollowedTrace& followed, const FollowedDevice& device,
                        std::vector<LiveBlock>& blocks) {
  const LiveSet& live_set = device.live_set;
  const BackwardRuns runs(trace, followed.table, live_set, device.point.event);
  for (size_t b = 0; b < blocks.size(); ++b)
    blocks[b].backward_ran = runs.has_run(followed.table[live_set.allocations[b]], live_set.saving_nodes[b]);
}

}  // namespace

MemoryState read_moment(const Trace& trace, const FollowedTrace& followed, const FollowedDevice& measured) {
  const DeviceHistory& history = measured.history;
  const auto index = static_cast<size_t>(history.index);
  const Device device = index < trace.devices.size() ? trace.devices[index] : Device{};
  const StatePoint& point = measured.point;
  const LiveSet& live_set = measured.live_set;
  MemoryState state{.event = point.event,
                    .step = history.failure ? history.failure->step : history.peak.step,
                    .phase = point.phase,
                    .allocated_bytes = live_set.allocated_bytes,
                    .pending_free_bytes = live_set.pending_bytes,
                    .reserved_bytes = live_set.reserved_bytes,
                    .saved_from_earlier_step = live_set.saved_from_earlier_step,
                    .blocks = describe_blocks(trace, followed, measured),
                    .segments = live_set.segments};
  mark_backward_runs(trace, followed, measured, state.blocks);
  if (point.event < trace.events.size() && (history.failure || !history.peak.at_start)) {
    state.time_ns = trace.time_ns(trace.events[point.event]);
    state.where = locate(trace, followed.nodes, trace.events[point.event]);
  }
  const int64_t total = std::max(device.total_bytes, state.reserved_bytes);
  describe_non_pytorch(trace, measured, total, device, state);
  return state;
}

// Read as an OOM is whose description is this traversal: of an earlier one nothing counts.
std::vector<LiveBlock> read_last_walk(const Trace& trace) {
  const TracePrescan prescan = prescan_trace(trace, {});
  const uint64_t traversal = prescan.last_traversal;
  if (traversal == TracePrescan::kNever) return {};
  const FollowedTrace followed = follow_allocations(
      trace, prescan,
      StatePoint{.event = traversal, .state_end = traversal, .description_end = trace.events.size(), .failed = true});
  std::vector<LiveBlock> saved;
  for (const FollowedDevice& device : followed.devices) {
    for (LiveBlock& block : describe_blocks(trace, followed, device)) {
      block.bytes = block.requested_bytes;
      if (!block.saved_by.empty()) saved.push_back(std::move(block));
    }
  }
  return saved;
}

}  // namespace oomdiag
