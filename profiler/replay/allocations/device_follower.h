#pragma once

#include <cstdint>
#include <vector>

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/growth_samples.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/allocations/open_ops.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/evidence/graphs.h"
#include "profiler/replay/steps/phases.h"

namespace oomdiag {

/// What all cards share on the way through a trace.
struct Pass {
  Pass(const Trace& events, const Outline& outline) : trace(events), phases(events, outline) {}

  const Trace& trace;
  Phases phases;
  BlockTable table{};
  OpenOps ops{};
  Graphs graphs{};
  uint64_t optimizer_open_since = kNoEvent;  ///< scope_begin of an optimizer step that has not ended
};

/// Follows the blocks of one card: give it the card's events in order.
class CardFollower {
 public:
  CardFollower(Pass& pass, const AllocatorSettings& settings, const Wanted& wanted);

  void allocate(const Event& event, uint64_t index);
  void request_free(const Event& event, uint64_t index);
  void complete_free(const Event& event, uint64_t index);
  /// A segment event.
  void apply(const Event& event, uint64_t index) { blocks_.apply(event, static_cast<uint32_t>(index)); }
  void read_layout(const Event& event, uint64_t index);
  /// An event that names a block.
  void note(const Event& event, uint64_t index);
  /// … that is older than the trace.
  void note_kept(const Event& event);

  /// Says that another step has begun.
  void turn_step(uint32_t ended, uint64_t index);
  /// The next event at which `stop` has something to do: the failing request, or the state to describe.
  uint64_t next_stop() const;
  void stop(uint64_t index);

  /// Whether a walk that begins here is the first that describes this card's OOM.
  bool begins_own_walk(uint64_t index) const;
  void note_walk(uint64_t index);
  void note_backward() { savers_.note_backward(); }
  /// No graph of the newest walk lives any more.
  void end_walk() { savers_.conclude(pass_.table, lives_.cut); }

  /// After the trace. `nodes` of the whole trace.
  CardViews finish(const NodeTable& nodes);

 private:
  uint8_t device() const { return wanted_.instant.device; }
  bool has_own_walk() const;
  Horizon horizon_at(uint64_t index) const;
  void end_steps(uint64_t index);
  void cut(uint64_t index);
  void adopt(const std::vector<Event>& layout, uint64_t index);
  uint32_t ensure_row(const Block& block, uint64_t index);
  void describe_initial(Row& row) const;
  void show(uint32_t row, uint64_t index);
  bool is_described(uint64_t index) const;

  Pass& pass_;
  const Wanted& wanted_;
  Blocks blocks_;
  PlaceCounter counter_;
  GrowthSamples places_;
  CutSavers savers_;
  bool has_failed_ = false, is_cut_ = false;
  bool own_walk_ = false;    ///< the OOM's description holds a walk
  bool own_walked_ = false;  ///< … and it has begun
  CardViews lives_;
};

}  // namespace oomdiag
