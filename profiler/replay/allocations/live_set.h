#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/evidence/allocation_reader.h"
#include "profiler/replay/evidence/graphs.h"

// Two ways to look at the table of blocks: a moment is a cut through it, a step a slice of it. Rows that they have taken in
// outlive their blocks, and go on learning what later events say of these.
//
//   blocks ↑      ────────────            │ cut: the blocks that live
//          │   ───────────────────────────┼──────
//          │         ─────── ─── ─────    │   ──────
//          └─────────|───────── slice ────|───────→ events
namespace oomdiag {

/// The blocks of one card at one moment.
struct Cut {
  std::vector<Block> blocks{};   ///< in use, by address
  std::vector<uint32_t> rows{};  ///< of each
  std::vector<SegmentLayout> segments{};
  int64_t allocated_bytes = 0, pending_bytes = 0, reserved_bytes = 0;
  Horizon horizon{};
  std::vector<std::vector<Saver>> savers{};  ///< of each block: the nodes that keep it at the moment
  bool saved_by_likeness = false;            ///< they are taken from an earlier step
};

/// Finds out which savers count for a cut, as the walk that tells may be still to come; see graphs.h.
class CutSavers {
 public:
  /// At the cut. `own_walk`: it is an OOM whose description holds a walk.
  void begin(const Cut& cut, Phase phase, bool own_walk, const Graphs& graphs);
  /// A walk has begun, or backward has without one.
  void note_walk(const Graphs& graphs);
  void note_backward() { waits_ = waits_ && own_walk_; }
  /// The graph that was walked ends to live.
  void conclude(const BlockTable& table, Cut& cut);
  /// After the trace.
  void finish(const BlockTable& table, Cut& cut);

 private:
  void infer(const BlockTable& table, Cut& cut) const;

  bool waits_ = false, own_walk_ = false, done_ = true;
  uint32_t walk_ = 0;  ///< that tells; 0: none yet
  bool may_infer_ = false;
  std::shared_ptr<const SavedAllocations> alike_;
  uint64_t alike_began_ = kNoEvent;  ///< younger blocks may be told by alike_
};

/// The blocks of one card in one step. Of a step of very many blocks only those that live at high points are kept: it is
/// cut into windows of equally many allocations, which grow as the step does, and what lives at none of their highest
/// moments is let go. So the peak stays what it was.
class StepSlice {
 public:
  static constexpr size_t kMostRows = size_t{1} << 16;

  explicit StepSlice(uint32_t step) : step_(step) {}

  uint32_t step() const { return step_; }
  bool is_open() const { return is_open_; }

  /// The step begins with these blocks.
  void begin(uint64_t index, const std::vector<uint32_t>& living, BlockTable& table, const Graphs& graphs);
  /// A block was made; then so many bytes were allocated.
  void add(uint32_t row, uint64_t index, int64_t allocated_bytes, BlockTable& table);
  void note_walk() { walked_ = walked_ || is_open_; }
  /// The step is over, or what is to be seen of it.
  void end(const Horizon& horizon, BlockTable& table);

  uint64_t begins() const { return begins_; }
  const Horizon& horizon() const { return horizon_; }
  const std::vector<uint32_t>& rows() const { return rows_; }
  /// The nodes that keep this block in the step.
  std::vector<Saver> savers_of(const Row& row) const;

 private:
  struct High {
    uint64_t index = 0;
    int64_t bytes = 0;
  };
  void thin(BlockTable& table);
  void join_windows();
  bool lives_at_high_point(const Row& row) const;

  uint32_t step_;
  bool is_open_ = false, walked_ = false;
  uint64_t begins_ = kNoEvent;
  uint32_t walks_before_ = 0;
  std::shared_ptr<const SavedAllocations> alike_;
  Horizon horizon_{};
  std::vector<uint32_t> rows_;
  std::vector<High> highs_;
  uint64_t window_ = 1, in_window_ = 0;
  size_t limit_ = kMostRows;
};

}  // namespace oomdiag
