#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "profiler/replay/facts.h"

// Which saved tensors count at an instant? The graph is walked when a backward pass begins, and by the OOM observer:
//
//   ── forward ──┬─ walk ── backward ──┬── optimizer ──┬── forward ──┬─ walk ── backward ──
//        ^ peak here: the next walk    ^ here: the one before        ^ OOM here: the walk in its own description
//
// A walk of an earlier pass says nothing any more: its graph is gone. But the recorder walks only passes that may set the
// peak, and a step may set it by a few bytes all the same. Training steps repeat, so then the last step that was walked
// tells: a block made by the same place in the same op with the same size is kept by the same nodes.
namespace oomdiag {

/// The events from `begin` to before `end`; empty if both are equal.
struct Window {
  uint64_t begin = 0, end = 0;

  bool empty() const { return begin == end; }
  bool contains(uint64_t index) const { return index >= begin && index < end; }
};

/// The walks of the graph that lives at `instant`; empty if it was not walked, or if no graph lives.
Window find_walks(const Trace& trace, const Instant& instant);

/// Where the graph was not walked: the newest walks of an earlier step. Empty in phases in which no graph lives.
Window find_earlier_walks(const Trace& trace, const Instant& instant);

/// What makes two blocks of different steps alike: the place in the program (context), the bytes, and which one of its op.
using Likeness = std::tuple<uint32_t, int64_t, uint32_t>;

/// Tells blocks of one op call apart: counts the allocations of the op that a thread runs.
class AllocCounter {
 public:
  /// How many allocations of the same call came before this one. Outside of any op that says nothing.
  uint32_t count(const Event& alloc) {
    Running& running = threads_[alloc.thread];
    if (running.serial != alloc.op_serial) running = {alloc.op_serial, 0};
    return running.allocs++;
  }

 private:
  struct Running {
    uint32_t serial = 0, allocs = 0;
  };
  AddressMap<Running> threads_;
};

/// For each of `blocks` that is younger than `walks`: the saved_tensor events there of its like.
std::vector<std::vector<uint64_t>> saved_alike(const Trace& trace, const Window& walks, const Instant& instant,
                                               std::span<const Block> blocks);

}  // namespace oomdiag
