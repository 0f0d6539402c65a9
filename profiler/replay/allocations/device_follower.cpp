#include "profiler/replay/allocations/device_follower.h"

#include <algorithm>

#include "profiler/replay/allocator/initial_layout.h"
#include "profiler/replay/allocator/layout.h"
#include "profiler/trace/group_role.h"

namespace oomdiag {
namespace {

bool frees_in_own_op(const Event& maker, const Event& free) {
  if (maker.call_id != 0 && maker.call_id == free.call_id) return true;
  return in_node(maker) && maker.node_sequence == free.node_sequence && maker.node_thread == free.node_thread &&
         maker.node_sequence != kAccumulateGrad;
}

}  // namespace

DeviceFollower::DeviceFollower(PassState& pass, const AllocatorSettings& settings, const ViewRequest& requested)
    : pass_(pass),
      request_(requested),
      blocks_(settings),
      counter_(pass.trace.contexts.size()),
      own_traversal_(has_own_traversal()) {
  for (const uint32_t step : requested.steps) lives_.steps.emplace_back(step);
  blocks_.start_from(pass.trace.initial, pass.trace.initial_layout, device());
  for (const Block& block : blocks_.in_use()) ensure_allocation(block, 0);
  places_.start_from(pass.trace, device());
}

void DeviceFollower::allocate(const Event& event, uint64_t index) {
  blocks_.apply(event, static_cast<uint32_t>(index));
  const Block* block = blocks_.live_at(event.address);
  if (block == nullptr || block->event != index) return;
  places_.add(event);
  const uint32_t id = pass_.table.add({.maker = event,
                                       .event = static_cast<uint32_t>(index),
                                       .bytes = block->bytes,
                                       .born = index,
                                       .step = pass_.phases.step(),
                                       .nth_at_place = counter_.next(event),
                                       .phase = pass_.phases.phase_of(event),
                                       .device = event.device},
                                      event.address);
  pass_.ops.note_alloc(id, pass_.table[id]);
  show(id, index);
}

void DeviceFollower::request_free(const Event& event, uint64_t index) {
  const uint32_t id = pass_.table.find(event.device, event.address);
  if (id != AllocationTable::kNone && pass_.table[id].alive()) {
    Allocation& allocation = pass_.table[id];
    allocation.died = index;
    allocation.died_in_op = frees_in_own_op(allocation.maker, event);
    allocation.died_in_optimizer =
        pass_.optimizer_open_since != kNoEvent && allocation.born > pass_.optimizer_open_since;
    allocation.freed_in_node = in_node(event);
    allocation.freed_by_accumulate = event.node_sequence == kAccumulateGrad;
    if (allocation.is_known()) places_.remove(allocation);
  }
  blocks_.apply(event, static_cast<uint32_t>(index));
  if ((event.flags & kFreeCompleted) != 0 && !is_described(index)) pass_.table.detach(event.device, event.address);
}

void DeviceFollower::complete_free(const Event& event, uint64_t index) {
  request_free(event, index);
  if (!is_described(index)) pass_.table.detach(event.device, event.address);
}

void DeviceFollower::read_layout(const Event& event, uint64_t index) {
  if ((event.flags & kBeforeRecording) == 0) return;
  if (const auto layout = find_initial_layout(pass_.trace.events, index); !layout.empty()) adopt(layout, index);
}

void DeviceFollower::note(const Event& event, uint64_t index) {
  if (event.address == 0) return;  // it is about a refusal
  uint32_t id = pass_.table.find(event.device, event.address);
  if (event.kind == EventKind::referrer) {
    if (id != AllocationTable::kNone) lives_.referrers.push_back({pass_.table[id].maker, event.detail, event.call_id});
    return;
  }
  if (id == AllocationTable::kNone) id = ensure_allocation({.address = event.address}, index);
  Allocation& allocation = pass_.table[id];
  if (event.kind == EventKind::grouped) {
    allocation.group = static_cast<uint32_t>(event.detail);
    allocation.parameter |= (event.flags & kGroupedParameter) != 0;
    allocation.state |= (event.flags & kGroupedState) != 0;
    allocation.trained |= (event.flags & kGroupedTrained) != 0;
    if ((event.flags & kGroupedGradient) != 0) allocation.gradient_since = std::min(allocation.gradient_since, index);
    return;
  }
  if (event.detail != 0) allocation.shape = static_cast<uint32_t>(event.detail);
  if (event.kind == EventKind::saved_tensor) return pass_.graphs.save(event, allocation);
  if (event.kind == EventKind::parameter) allocation.parameter = true;
  if (event.kind == EventKind::buffer) allocation.buffer = true;
  if (event.kind == EventKind::gradient) allocation.gradient_since = std::min(allocation.gradient_since, index);
  if (const uint32_t module = pass_.trace.context(event.context).module; module != 0) allocation.name = module;
}

void DeviceFollower::note_kept(const Event& event) {
  if (event.kind != EventKind::parameter && event.kind != EventKind::buffer) return;
  const uint32_t id = pass_.table.find(event.device, event.address);
  if (id == AllocationTable::kNone || !pass_.table[id].is_initial()) return;
  const uint64_t allocated = pass_.table[id].maker.sequence;
  if (allocated != 0 && allocated < event.sequence) note(event, 0);
}

void DeviceFollower::turn_step(uint32_t ended, uint64_t index) {
  places_.end_step(ended);
  end_steps(index);
  if (has_failed_) return;
  for (StepCollector& step : lives_.steps) {
    if (step.step() == 0 || step.step() != pass_.phases.step()) continue;
    step.begin(index, pass_.table.living(device()), pass_.table, pass_.graphs);
  }
}

uint64_t DeviceFollower::next_stop() const {
  const StatePoint& point = request_.point;
  if (point.failed && !has_failed_) return std::min(point.event, point.state_end);
  return is_taken_ ? kNoEvent : point.state_end;
}

void DeviceFollower::stop(uint64_t index) {
  const StatePoint& point = request_.point;
  if (point.failed && !has_failed_ && index >= point.event) {
    end_steps(index);
    has_failed_ = true;
  }
  if (!is_taken_ && index >= point.state_end) take_live_set(index);
}

bool DeviceFollower::begins_own_traversal(uint64_t index) const {
  const StatePoint& point = request_.point;
  return own_traversal_ && !own_traversed_ && index >= point.event && index < point.description_end;
}

void DeviceFollower::note_traversal(uint64_t index) {
  for (StepCollector& step : lives_.steps) step.note_traversal();
  own_traversed_ = own_traversed_ || begins_own_traversal(index);
  if (is_taken_ && own_traversal_ == own_traversed_) saving_nodes_.note_traversal(pass_.graphs);
}

DeviceViews DeviceFollower::finish(const NodeTable& nodes) {
  const uint64_t index = pass_.trace.events.size();
  stop(index);
  saving_nodes_.finish(pass_.table, lives_.live_set);
  end_steps(index);
  lives_.curves = places_.finish(pass_.trace, nodes);
  return std::move(lives_);
}

void DeviceFollower::end_steps(uint64_t index) {
  for (StepCollector& step : lives_.steps) {
    if (step.is_open()) step.end(observed_until(index), pass_.table);
  }
}

ObservationWindow DeviceFollower::observed_until(uint64_t index) const {
  const StatePoint& point = request_.point;
  ObservationWindow observed{.end = index, .named_end = index, .optimizer_open_since = pass_.optimizer_open_since};
  if (!point.failed) return observed;
  observed.unwound = point.event;
  if (index < point.event) return observed;
  observed.end = point.event;
  observed.named_end = point.description_end;
  observed.failed_op = pass_.trace.events[point.event].call_id;
  return observed;
}

void DeviceFollower::take_live_set(uint64_t index) {
  is_taken_ = true;
  const StatePoint& point = request_.point;
  if (point.failed && index < pass_.trace.events.size() && pass_.trace.events[index].kind == EventKind::segment_state) {
    adopt(pass_.trace.events.slice(index, point.description_end, kMaxLayoutEvents), index);
  }
  LiveSet& live_set = lives_.live_set;
  live_set.allocated_bytes = blocks_.allocated_bytes();
  live_set.pending_bytes = blocks_.pending_bytes();
  live_set.reserved_bytes = blocks_.reserved_bytes();
  live_set.blocks = blocks_.in_use();
  std::sort(live_set.blocks.begin(), live_set.blocks.end(), [](auto& a, auto& b) { return a.address < b.address; });
  for (const Block& block : live_set.blocks) {
    live_set.allocations.push_back(ensure_allocation(block, index));
    pass_.table.hold(live_set.allocations.back());
  }
  live_set.saving_nodes.resize(live_set.allocations.size());
  for (const auto& segment : blocks_.by_segment()) live_set.segments.push_back(lay_out(segment));
  live_set.observed = observed_until(index);
  saving_nodes_.begin(live_set, point.phase, own_traversal_, pass_.graphs);
  if (own_traversed_) saving_nodes_.note_traversal(pass_.graphs);
}

void DeviceFollower::adopt(const std::vector<Event>& layout, uint64_t index) {
  blocks_.adopt(layout, device());
  for (const Block& block : blocks_.in_use()) ensure_allocation(block, index);
}

// A block that no event told of has a record that says nothing but the names that its address is given.
uint32_t DeviceFollower::ensure_allocation(const Block& block, uint64_t index) {
  const uint32_t found = pass_.table.find(device(), block.address);
  if (found != AllocationTable::kNone && pass_.table[found].event == block.event) {
    pass_.table[found].bytes = block.bytes;
    return found;
  }
  Allocation allocation{.event = block.event, .bytes = block.bytes, .device = device()};
  if (allocation.is_initial()) describe_initial(allocation);
  const uint32_t id = pass_.table.add(std::move(allocation), block.address);
  if (block.bytes > 0) show(id, index);
  return id;
}

// Of what is older than the trace the context tells the phase, and the recorder's own list of steps the step; but that
// counts from the beginning of the program.
void DeviceFollower::describe_initial(Allocation& allocation) const {
  allocation.maker = pass_.trace.initial[allocation.event & ~Block::kInitial];
  const Context& context = pass_.trace.context(allocation.maker.context);
  if (in_node(allocation.maker) || context.node != 0) {
    allocation.phase = Phase::backward;
  } else if (is_optimizer_step(pass_.trace.name(context.scope))) {
    allocation.phase = Phase::optimizer;
  } else if (pass_.trace.process.snapshot) {
    allocation.phase = Phase::other;
  } else {
    allocation.phase = (context.flags & kGradMode) != 0 || context.module != 0 ? Phase::forward : Phase::setup;
  }
  if (allocation.maker.sequence == 0 || pass_.trace.step_ends.empty()) return;
  const uint32_t step = pass_.trace.step_of(allocation.maker.sequence);
  allocation.step = step == 1 && allocation.phase == Phase::setup ? 0 : step;
}

void DeviceFollower::show(uint32_t id, uint64_t index) {
  for (StepCollector& step : lives_.steps) {
    if (step.is_open()) step.add(id, index, blocks_.allocated_bytes(), pass_.table);
  }
}

// While an OOM is described its traversal may still come: blocks that other threads free meanwhile keep their names.
bool DeviceFollower::is_described(uint64_t index) const {
  return is_taken_ && request_.point.failed && index < request_.point.description_end;
}

bool DeviceFollower::has_own_traversal() const {
  const StatePoint& point = request_.point;
  if (!point.failed) return false;
  for (auto at = pass_.trace.events.from(point.event); at != pass_.trace.events.end(); ++at) {
    if (at.index() >= point.description_end) break;
    if (at->kind == EventKind::graph_begin) return true;
  }
  return false;
}

}  // namespace oomdiag
