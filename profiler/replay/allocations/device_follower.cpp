#include "profiler/replay/allocations/device_follower.h"

#include <algorithm>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/initial_layout.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/group_role.h"

namespace oomdiag {
namespace {

bool frees_in_own_op(const Event& maker, const Event& free) {
  if (maker.call_id != 0 && maker.call_id == free.call_id) return true;
  return in_node(maker) && maker.node_sequence == free.node_sequence && maker.node_thread == free.node_thread &&
         maker.node_sequence != kAccumulateGrad;
}

/// The end of the run of layout events that begins at `begin`. Other threads' events may lie between.
uint64_t end_of_layout(const EventLog& events, uint64_t begin) {
  uint64_t end = begin + 1;
  const uint16_t thread = events[begin].thread;
  for (auto at = events.from(begin); at != events.end(); ++at) {
    if (at->thread != thread) continue;
    if (at->kind != EventKind::segment_state && at->kind != EventKind::block_state) break;
    end = at.index() + 1;
  }
  return end;
}

}  // namespace

DeviceFollower::DeviceFollower(PassState& pass, uint8_t device, const std::optional<StatePoint>& at)
    : pass_(pass),
      device_(device),
      blocks_([&] {
        Blocks blocks(parse_allocator_settings(pass.trace.process.allocator_settings));
        blocks.start_from(pass.trace.initial, pass.trace.initial_layout, device);
        return blocks;
      }()),
      stats_(pass.trace, device, blocks_, result_),
      counter_(pass.trace.contexts.size()) {
  const uint64_t first = result_.history.peak.at_start ? 0 : std::min<uint64_t>(1, pass.trace.events.size());
  result_.point = at.value_or(StatePoint{.state_end = first, .description_end = first});
  result_.point.phase = result_.history.peak.phase;
  own_traversal_ = has_own_traversal();
  for (const Block& block : blocks_.in_use()) {
    const uint32_t id = add();
    Allocation& allocation = pass_.table[id];
    allocation.event = block.tag;
    allocation.bytes = block.bytes;
    if (allocation.is_initial()) describe_initial(allocation);
    blocks_.set_tag(*blocks_.find(block.address), id);
  }
  places_.start_from(pass.trace, device_);
}

void DeviceFollower::allocate(const Event& event, uint64_t index) {
  const Block* block = blocks_.apply(event);
  drop_ended(index);
  if (const auto named = elsewhere_.size() > 0 ? elsewhere_.take(event.address) : std::nullopt) {
    detach(*named);
  }
  stats_.note_event(index);
  const Phase phase = pass_.phases.phase_of(event);
  if (block != nullptr) {
    places_.add(event);
    const uint32_t id = add();
    Allocation& allocation = pass_.table[id];
    allocation.maker = event;
    allocation.event = static_cast<uint32_t>(index);
    allocation.bytes = block->bytes;
    allocation.born = index;
    allocation.step = pass_.phases.step();
    allocation.nth_at_place = counter_.next(event);
    allocation.phase = phase;
    blocks_.set_tag(*block, id);
    if (pass_.trace.process.snapshot) {
      allocation.maker.call_id = call_of(event);
      if (phase == Phase::optimizer) optimizer_allocated_ = index;
    }
    pass_.ops.note_alloc(id, allocation);
    step_.add(index, blocks_.allocated_bytes(), pass_.table);
  }
  if (stats_.note_alloc(event, index, pass_.phases.step(), phase, pass_.nodes)) note_peak(index);
  if (is_like_peak()) is_typical_ = true;
}

void DeviceFollower::free(const Event& event, uint64_t index) {
  const Block* block = blocks_.find(event.address);
  const uint32_t id = find(block, event.address);
  if (id != AllocationTable::kNone && pass_.table[id].alive()) request_free(id, event, index);
  blocks_.apply(event, block, Block::kNone);
  drop_ended(index);
  if (elsewhere_.size() > 0 && completes_free(event) && !is_described(index)) {
    if (const auto named = elsewhere_.take(event.address)) detach(*named);
  }
  stats_.note_event(index);
}

void DeviceFollower::apply(const Event& event, uint64_t index) {
  blocks_.apply(event);
  drop_ended(index);
  stats_.note_event(index);
}

void DeviceFollower::read_layout(const Event& event, uint64_t index) {
  if ((event.flags & kBeforeRecording) != 0) {
    const auto layout = find_initial_layout(pass_.trace.events, index);
    if (layout.empty()) return;
    adopt(layout, index);
    const uint64_t last = index + layout.size() - 1;
    if (stats_.note_initial_layout(last, pass_.phases)) note_peak(last);
    return;
  }
  if (index < pass_.layout_end) return;
  pass_.layout_end = end_of_layout(pass_.trace.events, index);
  const auto layout = pass_.trace.events.slice(index, pass_.layout_end, kMaxLayoutEvents);
  if (!stats_.check_layout(layout)) adopt(layout, index);
}

void DeviceFollower::note(const Event& event, uint64_t index) {
  if (event.kind == EventKind::referrer) result_.searched_at = std::min(result_.searched_at, index);
  if (event.kind == EventKind::referrer && event.address == 0) {
    const bool is_host_tensor = event.detail != 0;
    if ((event.flags & kPadded) != 0) {
      result_.padded.push_back({.variable = event.detail,
                                .shape = event.node_sequence,
                                .longest = std::max<int64_t>(0, event.bytes),
                                .per_mille = std::min<int64_t>(1000, event.call_id)});
    } else if (is_host_tensor) {
      result_.referrers.push_back({.variable = event.detail,
                                   .nodes = event.call_id,
                                   .bytes = event.bytes,
                                   .of_newest_steps = (event.flags & kOfNewestSteps) != 0,
                                   .on_host = true});
    } else if ((event.flags & kSearchCutShort) != 0) {
      result_.search_was_cut = true;
    }
  }
  if (event.address == 0) return;  // it is about an OOM, or a search begins
  uint32_t id = find(blocks_.find(event.address), event.address);
  if (event.kind == EventKind::referrer) {
    if (id == AllocationTable::kNone) return;
    Allocation& allocation = pass_.table[id];
    const bool wants_gradient = (event.flags & kWantsGradient) != 0;
    result_.referrers.push_back({.maker = allocation.maker,
                                 .variable = event.detail,
                                 .nodes = event.call_id,
                                 .bytes = event.bytes,
                                 .wants_gradient = wants_gradient,
                                 .of_newest_steps = (event.flags & kOfNewestSteps) != 0,
                                 .born = allocation.born});
    // What no graph saved and no module owns is described here alone. A tensor of fewer bytes is a view, of the storage another one.
    const bool is_parameter = (event.flags & kIsParameter) != 0;
    allocation.uncalled |= is_parameter && !allocation.parameter;
    allocation.parameter |= is_parameter;
    if (allocation.shape == 0 && event.bytes * 2 > allocation.maker.bytes)
      allocation.shape = static_cast<uint32_t>(event.node_sequence);
    return;
  }
  if (id == AllocationTable::kNone) elsewhere_[event.address] = id = add();
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
  if (event.kind == EventKind::saved_tensor) {
    const bool is_marked = allocation.number < marked_before_;
    if (is_marked && pass_.graphs.replaces(allocation)) saving_nodes_.keep(id, allocation);
    return pass_.graphs.save(event, allocation);
  }
  // A leaf of a graph that a node builds inside of backward, of what it has made anew, is no parameter of a module.
  const bool is_named = pass_.trace.context(event.context).module != 0;
  if (event.kind == EventKind::parameter) allocation.parameter |= is_named || !in_node(allocation.maker);
  if (event.kind == EventKind::buffer) allocation.buffer = true;
  if (event.kind == EventKind::gradient) allocation.gradient_since = std::min(allocation.gradient_since, index);
  if (const uint32_t module = pass_.trace.context(event.context).module; module != 0) allocation.name = module;
}

void DeviceFollower::note_kept(const Event& event) {
  if (event.kind != EventKind::parameter && event.kind != EventKind::buffer) return;
  const uint32_t id = find(blocks_.find(event.address), event.address);
  if (id == AllocationTable::kNone || !pass_.table[id].is_initial()) return;
  const uint64_t allocated = pass_.table[id].maker.sequence;
  if (allocated != 0 && allocated < event.sequence) note(event, 0);
}

// A block of which no event was recorded has an allocation that says nothing but the names that its address is given.
void DeviceFollower::adopt(const std::vector<Event>& layout, uint64_t index) {
  blocks_.adopt(layout, device_);
  drop_ended(index);
  for (const Block& block : blocks_.in_use()) {
    std::optional<uint32_t> id;
    if (block.tag != Block::kNone) id = block.tag;
    if (!id) id = elsewhere_.take(block.address);
    if (id && block.tag == Block::kNone && pass_.table[*id].is_known()) {
      detach(*id);
      id.reset();
    }
    if (!id) {
      id = add();
      step_.add(index, blocks_.allocated_bytes(), pass_.table);
    }
    pass_.table[*id].bytes = block.bytes;
    blocks_.set_tag(*blocks_.find(block.address), *id);
  }
}

uint32_t DeviceFollower::add() {
  ++living_;
  return pass_.table.add(device_);
}

uint32_t DeviceFollower::find(const Block* block, uint64_t address) const {
  if (block != nullptr && block->is_in_use()) return block->tag;
  const uint32_t* id = elsewhere_.size() > 0 ? elsewhere_.find(address) : nullptr;
  return id == nullptr ? AllocationTable::kNone : *id;
}

void DeviceFollower::request_free(uint32_t id, const Event& event, uint64_t index) {
  Allocation& allocation = pass_.table[id];
  allocation.died = index;
  end(id);
  allocation.died_in_op = frees_in_own_op(allocation.maker, event);
  allocation.died_in_optimizer = pass_.optimizer_open_since != kNoEvent && allocation.born > pass_.optimizer_open_since;
  allocation.freed_in_node = in_node(event);
  if (pass_.trace.process.snapshot) describe_free(allocation, event);
  allocation.freed_by_accumulate = event.node_sequence == kAccumulateGrad;
  if (allocation.is_known()) places_.remove(allocation);
}

// While an OOM is described its traversal may still come: blocks that other threads free meanwhile keep their names.
void DeviceFollower::drop_ended(uint64_t index) {
  for (const auto& [address, id] : blocks_.ended()) {
    if (is_described(index)) {
      elsewhere_[address] = id;
    } else {
      detach(id);
    }
  }
}

// It no longer lives: views that it is part of will not find it among those that do.
void DeviceFollower::end(uint32_t id) {
  --living_;
  step_.note_end(id, pass_.table);
  kept_.note_end(id, pass_.table);
  typical_.note_end(id, pass_.table);
}

void DeviceFollower::detach(uint32_t id) {
  if (pass_.table[id].alive()) end(id);
  if (pass_.table[id].number < marked_before_) marked_.add(id, pass_.table);
  pass_.table.detach(id);
}

// Where nothing tells what was called, each allocation is a call, with the frees that follow it.
uint32_t DeviceFollower::call_of(const Event& event) {
  const bool has_marks = pass_.trace.marks_of(event.context) != 0;
  const bool same = event.context == call_.context && (has_marks || event.kind != EventKind::alloc);
  call_.context = event.context;
  return same ? call_.serial : ++call_.serial;
}

void DeviceFollower::describe_free(Allocation& allocation, const Event& event) {
  const Context& context = pass_.trace.context(event.context);
  const uint32_t call = call_of(event);
  allocation.died_in_op = allocation.maker.call_id == call;
  allocation.freed_in_node = context.node != 0;
  allocation.freed_at = event.context;
  allocation.end_step = pass_.phases.step();
  if (!allocation.freed_in_node || allocation.died_in_op) return;
  freed_by_backward_.resize(pass_.trace.contexts.size());
  if (allocation.maker.context < freed_by_backward_.size()) freed_by_backward_[allocation.maker.context] = true;
}

// What becomes of the blocks of the described moment is known after it. Where the optimizer has begun, backward is over: what
// lives then outlives it.
void DeviceFollower::finish_fates() {
  for (const uint32_t id : result_.live_set.allocations) {
    Allocation& allocation = pass_.table[id];
    const bool outlives = allocation.phase != Phase::optimizer && allocation.born < optimizer_allocated_;
    const bool lives = allocation.died >= result_.live_set.observed.unwound;
    if (lives) allocation.end_step = pass_.phases.step() + (outlives ? 1 : 0);
    const uint32_t context = allocation.maker.context;
    allocation.saved_before = context < freed_by_backward_.size() && freed_by_backward_[context];
  }
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

bool DeviceFollower::is_described(uint64_t index) const {
  return is_marked_ && result_.point.failed && index < result_.point.description_end;
}

}  // namespace oomdiag
