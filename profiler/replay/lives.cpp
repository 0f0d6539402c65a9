#include "profiler/replay/lives.h"

#include <algorithm>
#include <map>
#include <utility>

#include "profiler/replay/blocks.h"
#include "profiler/replay/categories.h"
#include "profiler/replay/phases.h"
#include "profiler/replay/walks.h"

namespace oomdiag {
namespace {

/// A block on its way through the step, with the evidence for its category.
struct Draft {
  BlockLife life;
  Event maker{};
  std::map<std::pair<uint64_t, uint16_t>, Event> savers{};  ///< by node
  uint32_t shape = 0;
  bool parameter = false, buffer = false, gradient = false;
  bool dies_in_op = false;
  uint32_t nth_in_op = 0;

  bool first_in_op() const { return maker.op_serial == 0 || nth_in_op == 0; }
  Likeness likeness() const { return {maker.context, maker.bytes, nth_in_op}; }
};

bool frees_in_own_op(const Event& maker, const Event& free) {
  if (maker.op_serial != 0 && maker.op_serial == free.op_serial) return true;
  return in_node(maker) && maker.node_sequence == free.node_sequence && maker.node_thread == free.node_thread &&
         maker.node_sequence != kAccumulateGrad;
}

// The step of the peak. But step 1 makes gradients and optimizer state only as it goes: a later step that comes as near to
// the peak as makes no difference tells more.
uint32_t typical_step(const DeviceHistory& device) {
  if (device.peak.step != 1) return device.peak.step;
  for (const PhasePeak& peak : device.phases) {
    if (peak.step > 1 && peak.allocated_bytes >= device.peak.allocated_bytes / 1000 * 999) return peak.step;
  }
  return 1;
}

/// One pass over the events up to the end of the step. Before the step begins only what is alive is remembered.
class Follower {
 public:
  Follower(const Trace& trace, const Outline& outline, const NodeTable& nodes, const DeviceHistory& device,
           const AllocatorSettings& settings)
      : trace_(trace),
        nodes_(nodes),
        device_(static_cast<uint8_t>(device.index)),
        step_(device.failure ? device.failure->step : typical_step(device)),
        end_(device.failure ? device.failure->end + 1 : trace.events.size()),
        last_(device.failure ? device.failure->event : trace.events.size()),
        refusal_(device.failure ? &*device.failure : nullptr),
        blocks_(settings),
        phases_(trace, outline) {
    blocks_.start_from(trace.initial, trace.initial_layout, device_);
    for (const Event& event : trace.initial) {
      if (event.device == device_) begin(event);
    }
  }

  StepLives follow() {
    if (step_ == 0) return {};
    for (auto at = trace_.events.begin(); at != trace_.events.end(); ++at) {
      if (at.index() >= end_ || phases_.step() > step_) break;
      take(*at, at.index());
    }
    StepLives lives{.step = step_};
    for (Draft& draft : drafts_) {
      if (draft.life.bytes == 0) continue;
      infer_savers(draft);
      lives.blocks.push_back(finish(draft));
    }
    if (refusal_ != nullptr) lives.blocks.push_back(wanted_block());
    std::stable_sort(lives.blocks.begin(), lives.blocks.end(),
                     [](const BlockLife& a, const BlockLife& b) { return a.born < b.born; });
    return lives;
  }

 private:
  bool in_step() const { return phases_.step() == step_; }

  void take(const Event& event, uint64_t index) {
    phases_.advance(event, index);
    if (phases_.step() > step_) return;
    if (event.kind == EventKind::nodes_created) note_nodes(event);
    if (event.kind == EventKind::graph_begin) note_walk();
    if (event.device != device_) return;
    if (event.kind == EventKind::free_requested && index < last_) end(event);
    blocks_.apply(event, static_cast<uint32_t>(index));
    if (event.kind == EventKind::alloc) begin(event);
    const bool names = event.kind == EventKind::saved_tensor || event.kind == EventKind::parameter ||
                       event.kind == EventKind::buffer || event.kind == EventKind::gradient;
    if (names) note(event);
  }

  void begin(const Event& event) {
    const Block* block = blocks_.live_at(event.address);
    if (block == nullptr) return;
    Draft draft{.life = {.bytes = block->bytes, .phase = phases_.phase_of(event)}, .maker = event};
    if (in_step()) draft.life.born = ++position_;
    draft.nth_in_op = counter_.count(event);
    uint32_t place = 0;
    if (in_step() || unused_.empty()) {
      place = static_cast<uint32_t>(drafts_.size());
      drafts_.push_back(std::move(draft));
    } else {
      place = unused_.back();
      unused_.pop_back();
      drafts_[place] = std::move(draft);
    }
    at_[event.address] = place;
  }

  void end(const Event& event) {
    const uint32_t* place = at_.find(event.address);
    if (place == nullptr) return;
    Draft& draft = drafts_[*place];
    if (in_step()) {
      draft.life.died = ++position_;
      draft.life.freed_in_backward = in_node(event);
      draft.life.freed_by_accumulate = event.node_sequence == kAccumulateGrad;
      draft.dies_in_op = frees_in_own_op(draft.maker, event);
    } else {
      unused_.push_back(*place);
      draft = {};
    }
    at_.erase(event.address);
  }

  void note(const Event& event) {
    const uint32_t* place = at_.find(event.address);
    if (place == nullptr) return;
    Draft& draft = drafts_[*place];
    if (event.detail != 0) draft.shape = static_cast<uint32_t>(event.detail);
    if (event.kind == EventKind::parameter) draft.parameter = true;
    if (event.kind == EventKind::buffer) draft.buffer = true;
    if (event.kind == EventKind::gradient) draft.gradient = true;
    if (event.kind != EventKind::saved_tensor) return;
    draft.life.ever_saved = true;
    if (in_step()) {
      draft.savers[{event.node_sequence, event.node_thread}] = event;
    } else {
      saved_before_[draft.likeness()].push_back(event);
    }
  }

  void note_nodes(const Event& event) {
    if (in_step()) made_nodes_[event.op_serial] = true;
    if (!in_backward(trace_, event)) in_walk_ = false;
  }

  void note_walk() {
    if (in_step()) walked_ = true;
    if (!std::exchange(in_walk_, true)) saved_before_.clear();
  }

  // What a step that was not walked saves is told by the last one that was, see walks.h.
  void infer_savers(Draft& draft) const {
    if (walked_ || draft.life.born == BlockLife::kBefore) return;
    const auto like = saved_before_.find(draft.likeness());
    if (like == saved_before_.end()) return;
    draft.life.ever_saved = true;
    if (draft.shape == 0) draft.shape = static_cast<uint32_t>(like->second.front().detail);
    for (const Event& saver : like->second) draft.savers[{saver.node_sequence, saver.node_thread}] = saver;
  }

  // Also where the graph was not walked: what a recorded op made and a node of backward frees was saved for it.
  static bool was_saved(const Draft& draft, bool op_made_nodes) {
    if (!draft.savers.empty()) return true;
    return draft.life.phase == Phase::forward && op_made_nodes && draft.life.freed_in_backward;
  }

  BlockLife finish(Draft& draft) const {
    const Context& context = trace_.context(draft.maker.context);
    const bool* made_nodes = made_nodes_.find(draft.maker.op_serial);
    const bool op_made_nodes = made_nodes != nullptr && draft.maker.op_serial != 0;
    BlockLife life = std::move(draft.life);
    const bool gemm_keeps =
        is_gemm(trace_.name(context.inner)) && !draft.first_in_op() && life.died == BlockLife::kNever;
    life.category = categorise({.parameter = draft.parameter,
                                .buffer = draft.buffer,
                                .gradient = draft.gradient,
                                .saved = was_saved(draft, op_made_nodes),
                                .ever_saved = life.ever_saved,
                                .phase = life.phase,
                                .in_node = in_node(draft.maker) || context.node != 0,
                                .recomputed = (context.flags & kRecomputation) != 0,
                                .in_optimizer = is_optimizer_step(trace_.name(context.scope)),
                                .optimizer_is_open = life.died != BlockLife::kNever,
                                .in_module = context.module != 0,
                                .op_made_nodes = op_made_nodes,
                                .grad_mode = (context.flags & kGradMode) != 0,
                                .first_in_op = draft.first_in_op(),
                                .dies_in_op = draft.dies_in_op,
                                .kept_workspace = gemm_keeps,
                                .modules_known = trace_.process.python,
                                .op = trace_.name(context.op),
                                .inner = trace_.name(context.inner)});
    life.in_graph = op_made_nodes && life.phase == Phase::forward;
    life.made = locate(trace_, nodes_, draft.maker);
    life.shape = trace_.name(draft.shape);
    for (const auto& [node, saver] : draft.savers) life.saved_by.push_back(locate(trace_, nodes_, saver));
    return life;
  }

  // What was refused, as if it had been granted.
  BlockLife wanted_block() const {
    BlockLife life{.bytes = refusal_->requested_bytes, .born = position_ + 1, .phase = refusal_->phase};
    life.made = refusal_->where;
    if (life.phase == Phase::forward) life.category = Category::output;
    if (life.phase == Phase::backward) life.category = Category::gradient_in_flight;
    if (life.phase == Phase::optimizer) life.category = Category::optimizer_state;
    const bool scratch = takes_workspace(refusal_->where.inner) && !refusal_->first_in_op;
    if (scratch && refusal_->wanted_shape.empty()) life.category = Category::workspace;
    return life;
  }

  const Trace& trace_;
  const NodeTable& nodes_;
  uint8_t device_;
  uint32_t step_;
  uint64_t end_, last_;
  const OutOfMemory* refusal_;
  Blocks blocks_;
  Phases phases_;
  std::vector<Draft> drafts_;
  std::vector<uint32_t> unused_;
  AddressMap<uint32_t> at_;      ///< index into drafts_ by address
  AddressMap<bool> made_nodes_;  ///< by op serial
  AllocCounter counter_;
  std::map<Likeness, std::vector<Event>> saved_before_;  ///< by the newest walks before the step
  bool in_walk_ = false;                                 ///< the graph was walked, and no forward pass began since
  bool walked_ = false;                                  ///< the graph was walked in the step
  uint32_t position_ = 0;
};

}  // namespace

StepLives follow_lives(const Trace& trace, const Outline& outline, const NodeTable& nodes, const DeviceHistory& device,
                       const AllocatorSettings& settings) {
  return Follower(trace, outline, nodes, device, settings).follow();
}

}  // namespace oomdiag
