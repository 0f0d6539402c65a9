#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "profiler/replay/block_table.h"

// Which saved tensors count at a moment? The graph is walked when a backward pass begins, and by the OOM observer:
//
//   ── forward ──┬─ walk ── backward ──┬── optimizer ──┬── forward ──┬─ walk ── backward ──
//        ^ peak here: the next walk    ^ here: the one before        ^ OOM here: the walk in its own description
//
// A walk of an earlier pass says nothing any more: its graph is gone. But the recorder walks only passes that may set the
// peak, and a step may set it by a few bytes all the same. Training steps repeat, so then the last step that was walked
// tells: a block made by the same place in the same op with the same size is kept by the same nodes.
namespace oomdiag {

/// What makes two blocks of different steps alike: the place in the program (context), the bytes, and which one of its op.
using Likeness = std::tuple<uint32_t, int64_t, uint32_t>;
inline Likeness likeness_of(const Row& row) { return {row.maker.context, row.maker.bytes, row.nth_in_op}; }

/// Who keeps what in a graph, told so that it can be asked for another one.
using Alike = std::map<Likeness, std::vector<Saver>>;

/// Follows the walks of the autograd graph.
class Graphs {
 public:
  /// A graph_begin event; `at_refusal`: the first that describes a fatal OOM. What it finds is what still counts there.
  void begin_walk(bool at_refusal);
  /// A forward op made nodes. True: until now the graph of the walk lived.
  bool end_walk(uint64_t index);
  /// A saved_tensor event of this block.
  void save(const Event& event, Row& row);

  /// The newest walk, counted from 1.
  uint32_t walk() const { return walk_; }
  /// Its graph lives: no forward pass has begun since.
  bool walked() const { return open_; }
  /// What the newest walk found.
  std::shared_ptr<const Alike> newest() const { return alike_; }
  /// When the forward pass after it began; blocks that are younger may be told by it.
  uint64_t ended() const { return ended_; }

 private:
  uint32_t graph_ = 0, walk_ = 0;
  bool open_ = false;
  uint64_t ended_ = kNoEvent;
  std::shared_ptr<Alike> alike_ = std::make_shared<Alike>();
};

/// What keeps a block like `row` in the graph that `alike` tells of; empty if nothing does.
const std::vector<Saver>& savers_alike(const Alike& alike, const Row& row);

}  // namespace oomdiag
