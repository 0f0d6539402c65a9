#include "profiler/replay/allocations/allocation_pass.h"

#include <algorithm>

#include "profiler/replay/allocations/device_follower.h"

// Every block has a row (block_table.h) from its allocation on. Events add to it what they say of the block, also after the
// moment that is described: a module may name its parameters later, and the graph is walked when backward begins. When the
// block is freed its row goes, unless a view (views.h) has taken it in; what of each place lives is a sum per place.

namespace oomdiag {
namespace {

class LivesReader {
 public:
  LivesReader(const Trace& trace, const Outline& outline, const AllocatorSettings& settings,
              std::span<const Wanted> wanted)
      : pass_(trace, outline), by_device_(kMaxDevices, nullptr) {
    cards_.reserve(wanted.size());
    for (const Wanted& one : wanted) {
      by_device_[one.instant.device] = &cards_.emplace_back(pass_, settings, one);
    }
    for (const Event& event : trace.kept) {
      if (CardFollower* card = card_of(event)) card->note_kept(event);
    }
    plan_next_stop();
  }

  Views read(const NodeTable& nodes) {
    const EventLog& events = pass_.trace.events;
    for (auto at = events.begin(); at != events.end(); ++at) take(*at, at.index());
    pass_.graphs.end_walk();
    Views views;
    for (CardFollower& card : cards_) views.cards.push_back(card.finish(nodes));
    views.table = std::move(pass_.table);
    return views;
  }

 private:
  CardFollower* card_of(const Event& event) const {
    return event.device < kMaxDevices ? by_device_[event.device] : nullptr;
  }

  void take(const Event& event, uint64_t index) {
    const uint32_t step = pass_.phases.step();
    pass_.phases.advance(event, index);
    if (pass_.phases.step() != step) [[unlikely]] {
      for (CardFollower& card : cards_) card.turn_step(step, index);
    }
    if (index >= next_stop_) [[unlikely]]
      stop(index);
    CardFollower* card = card_of(event);
    switch (event.kind) {
      case EventKind::alloc:
        if (in_node(event)) note_backward();
        if (card != nullptr) card->allocate(event, index);
        break;
      case EventKind::free_requested:
        if (card != nullptr) card->request_free(event, index);
        break;
      case EventKind::free_completed:
        if (card != nullptr) card->complete_free(event, index);
        break;
      case EventKind::segment_alloc:
      case EventKind::segment_free:
      case EventKind::segment_map:
      case EventKind::segment_unmap:
        if (card != nullptr) card->apply(event, index);
        break;
      case EventKind::segment_state:
        if (card != nullptr) card->read_layout(event, index);
        break;
      case EventKind::saved_tensor:
      case EventKind::parameter:
      case EventKind::buffer:
      case EventKind::gradient:
      case EventKind::grouped:
        if (card != nullptr) card->note(event, index);
        break;
      case EventKind::nodes_created:
        pass_.ops.note_nodes(event, pass_.table);
        if (!in_backward(pass_.trace, event)) end_walk();
        break;
      case EventKind::graph_begin:
        begin_walk(index);
        break;
      case EventKind::scope_begin:
      case EventKind::scope_end:
        note_scope(event, index);
        break;
      case EventKind::none:
      case EventKind::out_of_memory:
      case EventKind::device_memory:
      case EventKind::memory_stats:
      case EventKind::block_state:
      case EventKind::wanted:
      case EventKind::op_failed:
      case EventKind::packed_tensor:
      case EventKind::note:
      case EventKind::stack:
      case EventKind::driver_alloc:
      case EventKind::driver_map:
      case EventKind::driver_free:
      case EventKind::card_step:
      case EventKind::card_process:
        break;
    }
  }

  void plan_next_stop() {
    next_stop_ = kNoEvent;
    for (const CardFollower& card : cards_) next_stop_ = std::min(next_stop_, card.next_stop());
  }

  void stop(uint64_t index) {
    for (CardFollower& card : cards_) card.stop(index);
    plan_next_stop();
  }

  void begin_walk(uint64_t index) {
    const auto begins_own = [&](const CardFollower& card) { return card.begins_own_walk(index); };
    pass_.graphs.begin_walk(index, std::any_of(cards_.begin(), cards_.end(), begins_own));
    for (CardFollower& card : cards_) card.note_walk(index);
  }

  void end_walk() {
    if (!pass_.graphs.walked()) return;
    for (CardFollower& card : cards_) card.end_walk();
    pass_.graphs.end_walk();
  }

  void note_backward() {
    for (CardFollower& card : cards_) card.note_backward();
  }

  void note_scope(const Event& event, uint64_t index) {
    if (!is_optimizer_step(pass_.trace.name(event.detail))) return;
    pass_.optimizer_open_since = event.kind == EventKind::scope_begin ? index : kNoEvent;
  }

  Pass pass_;
  std::vector<CardFollower> cards_;
  std::vector<CardFollower*> by_device_;
  uint64_t next_stop_ = kNoEvent;
};

}  // namespace

Views follow_lives(const Trace& trace, const Outline& outline, const NodeTable& nodes,
                   const AllocatorSettings& settings, std::span<const Wanted> wanted) {
  return LivesReader(trace, outline, settings, wanted).read(nodes);
}

}  // namespace oomdiag
