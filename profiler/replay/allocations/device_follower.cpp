#include "profiler/replay/allocations/device_follower.h"

#include <algorithm>

#include "profiler/replay/allocator/initial_layout.h"
#include "profiler/replay/allocator/layout.h"
#include "profiler/trace/group_role.h"

namespace oomdiag {
namespace {

bool frees_in_own_op(const Event& maker, const Event& free) {
  if (maker.op_serial != 0 && maker.op_serial == free.op_serial) return true;
  return in_node(maker) && maker.node_sequence == free.node_sequence && maker.node_thread == free.node_thread &&
         maker.node_sequence != kAccumulateGrad;
}

}  // namespace

CardFollower::CardFollower(Pass& pass, const AllocatorSettings& settings, const Wanted& wanted)
    : pass_(pass), wanted_(wanted), blocks_(settings), counter_(pass.trace.contexts.size()), own_walk_(has_own_walk()) {
  for (const uint32_t step : wanted.steps) lives_.steps.emplace_back(step);
  blocks_.start_from(pass.trace.initial, pass.trace.initial_layout, device());
  for (const Block& block : blocks_.in_use()) ensure_row(block, 0);
  places_.start_from(pass.trace, device());
}

void CardFollower::allocate(const Event& event, uint64_t index) {
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

void CardFollower::request_free(const Event& event, uint64_t index) {
  const uint32_t id = pass_.table.find(event.device, event.address);
  if (id != BlockTable::kNone && pass_.table[id].alive()) {
    Row& row = pass_.table[id];
    row.died = index;
    row.died_in_op = frees_in_own_op(row.maker, event);
    row.died_in_optimizer = pass_.optimizer_open_since != kNoEvent && row.born > pass_.optimizer_open_since;
    row.freed_in_node = in_node(event);
    row.freed_by_accumulate = event.node_sequence == kAccumulateGrad;
    if (row.is_known()) places_.remove(row);
  }
  blocks_.apply(event, static_cast<uint32_t>(index));
  if ((event.flags & kFreeCompleted) != 0 && !is_described(index)) pass_.table.detach(event.device, event.address);
}

void CardFollower::complete_free(const Event& event, uint64_t index) {
  request_free(event, index);
  if (!is_described(index)) pass_.table.detach(event.device, event.address);
}

void CardFollower::read_layout(const Event& event, uint64_t index) {
  if ((event.flags & kBeforeRecording) == 0) return;
  if (const auto layout = find_initial_layout(pass_.trace.events, index); !layout.empty()) adopt(layout, index);
}

void CardFollower::note(const Event& event, uint64_t index) {
  if (event.address == 0) return;  // it is about a refusal
  uint32_t id = pass_.table.find(event.device, event.address);
  if (id == BlockTable::kNone) id = ensure_row({.address = event.address}, index);
  Row& row = pass_.table[id];
  if (event.kind == EventKind::grouped) {
    row.group = static_cast<uint32_t>(event.detail);
    row.parameter |= (event.flags & kGroupedParameter) != 0;
    row.state |= (event.flags & kGroupedState) != 0;
    row.trained |= (event.flags & kGroupedTrained) != 0;
    if ((event.flags & kGroupedGradient) != 0) row.gradient_since = std::min(row.gradient_since, index);
    return;
  }
  if (event.detail != 0) row.shape = static_cast<uint32_t>(event.detail);
  if (event.kind == EventKind::saved_tensor) return pass_.graphs.save(event, row);
  if (event.kind == EventKind::parameter) row.parameter = true;
  if (event.kind == EventKind::buffer) row.buffer = true;
  if (event.kind == EventKind::gradient) row.gradient_since = std::min(row.gradient_since, index);
  if (const uint32_t module = pass_.trace.context(event.context).module; module != 0) row.name = module;
}

void CardFollower::note_kept(const Event& event) {
  if (event.kind != EventKind::parameter && event.kind != EventKind::buffer) return;
  const uint32_t id = pass_.table.find(event.device, event.address);
  if (id == BlockTable::kNone || !pass_.table[id].is_initial()) return;
  const uint64_t allocated = pass_.table[id].maker.sequence;
  if (allocated != 0 && allocated < event.sequence) note(event, 0);
}

void CardFollower::turn_step(uint32_t ended, uint64_t index) {
  places_.end_step(ended);
  end_steps(index);
  if (has_failed_) return;
  for (StepSlice& step : lives_.steps) {
    if (step.step() == 0 || step.step() != pass_.phases.step()) continue;
    step.begin(index, pass_.table.living(device()), pass_.table, pass_.graphs);
  }
}

uint64_t CardFollower::next_stop() const {
  const Instant& instant = wanted_.instant;
  if (instant.failed && !has_failed_) return std::min(instant.event, instant.state_end);
  return is_cut_ ? kNoEvent : instant.state_end;
}

void CardFollower::stop(uint64_t index) {
  const Instant& instant = wanted_.instant;
  if (instant.failed && !has_failed_ && index >= instant.event) {
    end_steps(index);
    has_failed_ = true;
  }
  if (!is_cut_ && index >= instant.state_end) cut(index);
}

bool CardFollower::begins_own_walk(uint64_t index) const {
  const Instant& instant = wanted_.instant;
  return own_walk_ && !own_walked_ && index >= instant.event && index < instant.description_end;
}

void CardFollower::note_walk(uint64_t index) {
  for (StepSlice& step : lives_.steps) step.note_walk();
  own_walked_ = own_walked_ || begins_own_walk(index);
  if (is_cut_ && own_walk_ == own_walked_) savers_.note_walk(pass_.graphs);
}

CardViews CardFollower::finish(const NodeTable& nodes) {
  const uint64_t index = pass_.trace.events.size();
  stop(index);
  savers_.finish(pass_.table, lives_.cut);
  end_steps(index);
  lives_.curves = places_.finish(pass_.trace, nodes);
  return std::move(lives_);
}

void CardFollower::end_steps(uint64_t index) {
  for (StepSlice& step : lives_.steps) {
    if (step.is_open()) step.end(horizon_at(index), pass_.table);
  }
}

Horizon CardFollower::horizon_at(uint64_t index) const {
  const Instant& instant = wanted_.instant;
  Horizon horizon{.end = index, .named_end = index, .optimizer_open_since = pass_.optimizer_open_since};
  if (!instant.failed) return horizon;
  horizon.unwound = instant.event;
  if (index < instant.event) return horizon;
  horizon.end = instant.event;
  horizon.named_end = instant.description_end;
  horizon.failed_op = pass_.trace.events[instant.event].op_serial;
  return horizon;
}

void CardFollower::cut(uint64_t index) {
  is_cut_ = true;
  const Instant& instant = wanted_.instant;
  if (instant.failed && index < pass_.trace.events.size() &&
      pass_.trace.events[index].kind == EventKind::segment_state) {
    adopt(pass_.trace.events.slice(index, instant.description_end, kMostLayoutEvents), index);
  }
  Cut& cut = lives_.cut;
  cut.allocated_bytes = blocks_.allocated_bytes();
  cut.pending_bytes = blocks_.pending_bytes();
  cut.reserved_bytes = blocks_.reserved_bytes();
  cut.blocks = blocks_.in_use();
  std::sort(cut.blocks.begin(), cut.blocks.end(), [](auto& a, auto& b) { return a.address < b.address; });
  for (const Block& block : cut.blocks) {
    cut.rows.push_back(ensure_row(block, index));
    pass_.table.hold(cut.rows.back());
  }
  cut.savers.resize(cut.rows.size());
  for (const auto& segment : blocks_.by_segment()) cut.segments.push_back(lay_out(segment));
  cut.horizon = horizon_at(index);
  savers_.begin(cut, instant.phase, own_walk_, pass_.graphs);
  if (own_walked_) savers_.note_walk(pass_.graphs);
}

void CardFollower::adopt(const std::vector<Event>& layout, uint64_t index) {
  blocks_.adopt(layout, device());
  for (const Block& block : blocks_.in_use()) ensure_row(block, index);
}

// A block that no event told of has a row that tells nothing, but for the names that its address is given.
uint32_t CardFollower::ensure_row(const Block& block, uint64_t index) {
  const uint32_t found = pass_.table.find(device(), block.address);
  if (found != BlockTable::kNone && pass_.table[found].event == block.event) {
    pass_.table[found].bytes = block.bytes;
    return found;
  }
  Row row{.event = block.event, .bytes = block.bytes, .device = device()};
  if (row.is_initial()) describe_initial(row);
  const uint32_t id = pass_.table.add(std::move(row), block.address);
  if (block.bytes > 0) show(id, index);
  return id;
}

// Of what is older than the trace the context tells the phase, and the recorder's own list of steps the step; but that
// counts from the beginning of the program.
void CardFollower::describe_initial(Row& row) const {
  row.maker = pass_.trace.initial[row.event & ~Block::kInitial];
  const Context& context = pass_.trace.context(row.maker.context);
  if (in_node(row.maker) || context.node != 0) {
    row.phase = Phase::backward;
  } else if (is_optimizer_step(pass_.trace.name(context.scope))) {
    row.phase = Phase::optimizer;
  } else if (pass_.trace.process.snapshot) {
    row.phase = Phase::other;
  } else {
    row.phase = (context.flags & kGradMode) != 0 || context.module != 0 ? Phase::forward : Phase::setup;
  }
  if (row.maker.sequence == 0 || pass_.trace.step_ends.empty()) return;
  const uint32_t step = pass_.trace.step_of(row.maker.sequence);
  row.step = step == 1 && row.phase == Phase::setup ? 0 : step;
}

void CardFollower::show(uint32_t id, uint64_t index) {
  for (StepSlice& step : lives_.steps) {
    if (step.is_open()) step.add(id, index, blocks_.allocated_bytes(), pass_.table);
  }
}

// While an OOM is described its walk may still come: blocks that other threads free meanwhile keep their names.
bool CardFollower::is_described(uint64_t index) const {
  return is_cut_ && wanted_.instant.failed && index < wanted_.instant.description_end;
}

bool CardFollower::has_own_walk() const {
  const Instant& instant = wanted_.instant;
  if (!instant.failed) return false;
  for (auto at = pass_.trace.events.from(instant.event); at != pass_.trace.events.end(); ++at) {
    if (at.index() >= instant.description_end) break;
    if (at->kind == EventKind::graph_begin) return true;
  }
  return false;
}

}  // namespace oomdiag
