#include "profiler/replay/facts.h"

#include <algorithm>

#include "profiler/replay/join.h"
#include "profiler/replay/phases.h"
#include "profiler/replay/walks.h"

// Facts belong to instances. A block that is in use at the instant was allocated by event `a`; an event at its address
// speaks of it if it lies between `a` and the free of the block. Before the instant that is simply "later than a"; after
// it, until the first free at that address.

namespace oomdiag {
namespace {

/// One pass over the events, with the blocks of the instant in view.
class FactCollector {
 public:
  FactCollector(const Trace& trace, const Outline& outline, const Instant& instant, std::span<const Block> blocks)
      : trace_(trace), instant_(instant), blocks_(blocks), walks_(find_walks(trace, instant)), phases_(trace, outline) {
    sheet_.blocks.resize(blocks.size());
    for (uint32_t b = 0; b < blocks.size(); ++b) {
      watched_[blocks[b].address] = b;
      if (const uint32_t serial = maker_of(trace, blocks[b]).op_serial; serial != 0) ops_[serial] = {};
    }
  }

  FactSheet collect() {
    for (const Event& event : trace_.kept) read_kept(event);
    auto at = trace_.events.begin();
    for (; at.index() < instant_.state_end; ++at) read_before(*at, at.index());
    for (; at != trace_.events.end() && watched_.size() > 0; ++at) read_after(*at, at.index());
    if (walks_.empty()) infer_saved();
    for (size_t b = 0; b < blocks_.size(); ++b) conclude(blocks_[b], sheet_.blocks[b]);
    return std::move(sheet_);
  }

 private:
  struct OpFacts {
    uint64_t first_alloc = Outline::kNever;
    bool made_nodes = false;
  };

  bool is_known(const Block& block) const { return block.event != Block::kNone; }
  bool is_older(const Block& block, uint64_t index) const {
    return (block.event & Block::kInitial) != 0 || block.event < index;
  }

  // From before the trace: speaks of a block that is as old and was already there.
  void read_kept(const Event& event) {
    if (event.kind != EventKind::parameter && event.kind != EventKind::buffer) return;
    const uint32_t* b = event.device == instant_.device ? watched_.find(event.address) : nullptr;
    if (b == nullptr || !is_known(blocks_[*b]) || (blocks_[*b].event & Block::kInitial) == 0) return;
    const uint64_t allocated = maker_of(trace_, blocks_[*b]).sequence;
    if (allocated != 0 && allocated < event.sequence) note_storage(event, 0);
  }

  void read_before(const Event& event, uint64_t index) {
    phases_.advance(event, index);
    if (event.kind == EventKind::alloc) return note_alloc(event, index);
    const bool scope = event.kind == EventKind::scope_begin || event.kind == EventKind::scope_end;
    if (!scope) return note_fact(event, index);
    if (!is_optimizer_step(trace_.name(event.detail))) return;
    sheet_.optimizer_open_since = event.kind == EventKind::scope_begin ? index : Outline::kNever;
  }

  void read_after(const Event& event, uint64_t index) {
    if (event.kind == EventKind::free_requested) return note_free(event, index);
    if (event.kind == EventKind::alloc) return forget(event);
    if (event.kind == EventKind::gradient && index >= instant_.description_end) return;  // it became one later
    note_fact(event, index);
  }

  void note_alloc(const Event& event, uint64_t index) {
    if (OpFacts* op = ops_.find(event.op_serial); op != nullptr && op->first_alloc == Outline::kNever) {
      op->first_alloc = index;
    }
    if (event.device != instant_.device) return;
    const uint32_t* b = watched_.find(event.address);
    if (b == nullptr || blocks_[*b].event != index) return;
    sheet_.blocks[*b].phase = phases_.phase_of(event);
    sheet_.blocks[*b].step = phases_.step();
  }

  void note_fact(const Event& event, uint64_t index) {
    if (event.kind == EventKind::nodes_created) {
      if (OpFacts* op = ops_.find(event.op_serial)) op->made_nodes = true;
    }
    if (event.kind == EventKind::saved_tensor || event.kind == EventKind::parameter ||
        event.kind == EventKind::buffer || event.kind == EventKind::gradient || event.kind == EventKind::grouped) {
      note_storage(event, index);
    }
  }

  void note_storage(const Event& event, uint64_t index) {
    const uint32_t* b = event.device == instant_.device ? watched_.find(event.address) : nullptr;
    if (b == nullptr || (is_known(blocks_[*b]) && !is_older(blocks_[*b], index))) return;
    Facts& facts = sheet_.blocks[*b];
    if (event.kind == EventKind::grouped) {
      facts.group = event.detail;
      return;
    }
    if (event.detail != 0) facts.shape = event.detail;
    if (event.kind == EventKind::saved_tensor) {
      facts.ever_saved = true;
      if (walks_.contains(index)) facts.saved_by.push_back(index);
      return;
    }
    if (event.kind == EventKind::parameter) facts.parameter = true;
    if (event.kind == EventKind::buffer) facts.buffer = true;
    if (event.kind == EventKind::gradient) facts.gradient = true;
    if (const uint32_t module = trace_.context(event.context).module; module != 0) facts.name = module;
  }

  // At a peak the op goes on, and what it frees itself was only for itself. After an OOM everything is unwound.
  void note_free(const Event& event, uint64_t index) {
    if (event.device != instant_.device) return;
    const uint32_t* b = watched_.find(event.address);
    if (b == nullptr) return;
    const Event maker = maker_of(trace_, blocks_[*b]);
    const bool same_op = maker.op_serial != 0 && maker.op_serial == event.op_serial;
    const bool same_node = in_node(maker) && maker.node_sequence == event.node_sequence &&
                           maker.node_thread == event.node_thread && maker.node_sequence != kAccumulateGrad;
    if (!instant_.failed && (same_op || same_node)) sheet_.blocks[*b].dies_in_op = true;
    if (instant_.failed && index < instant_.description_end) return;  // the walk may still come
    watched_.erase(event.address);
  }

  void forget(const Event& event) {
    if (event.device == instant_.device) watched_.erase(event.address);
  }

  void infer_saved() {
    const Window earlier = find_earlier_walks(trace_, instant_);
    if (earlier.empty()) return;
    auto savers = saved_alike(trace_, earlier, instant_, blocks_);
    for (size_t b = 0; b < blocks_.size(); ++b) {
      if (savers[b].empty()) continue;
      sheet_.saved_by_likeness = true;
      Facts& facts = sheet_.blocks[b];
      facts.ever_saved = true;
      if (facts.shape == 0) facts.shape = trace_.events[savers[b].front()].detail;
      facts.saved_by = std::move(savers[b]);
    }
  }

  void conclude(const Block& block, Facts& facts) {
    const Event maker = maker_of(trace_, block);
    const OpFacts* op = ops_.find(maker.op_serial);
    if (op == nullptr) return;
    facts.op_made_nodes = op->made_nodes;
    facts.first_in_op = op->first_alloc == Outline::kNever || op->first_alloc == block.event;
    const bool in_failed_op = instant_.failed && maker.op_serial == trace_.events[instant_.event].op_serial;
    if (in_failed_op && !facts.first_in_op) facts.dies_in_op = true;
  }

  const Trace& trace_;
  const Instant& instant_;
  std::span<const Block> blocks_;
  Window walks_;
  Phases phases_;
  AddressMap<uint32_t> watched_;  ///< index into blocks_ by address
  AddressMap<OpFacts> ops_;       ///< by op serial: the ops that made the blocks
  FactSheet sheet_;
};

}  // namespace

FactSheet collect_facts(const Trace& trace, const Outline& outline, const Instant& instant,
                        std::span<const Block> blocks) {
  return FactCollector(trace, outline, instant, blocks).collect();
}

Event maker_of(const Trace& trace, const Block& block) {
  if (block.event == Block::kNone) return {};
  const uint32_t index = block.event & ~Block::kInitial;
  if ((block.event & Block::kInitial) != 0) return index < trace.initial.size() ? trace.initial[index] : Event{};
  return index < trace.events.size() ? trace.events[index] : Event{};
}

}  // namespace oomdiag
