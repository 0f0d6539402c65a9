#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"

// Which saved tensors count at a moment? The graph is traversed when a backward pass begins, and by the OOM observer:
//
//   ── forward ──┬─ traversal ── backward ──┬── optimizer ──┬── forward ──┬─ traversal ── backward ──
//        ^ peak here: the next traversal    ^ here: the one before        ^ OOM here: the one in its own description
//
// A traversal of an earlier pass says nothing any more: its graph is gone. But the recorder traverses the graphs of passes that may set the
// peak, and a step may set it by a few bytes all the same. Training steps repeat, so then the last step that was traversed
// decides: a block made by the same place in the same op with the same size is kept by the same nodes. A place that
// runs many times in a forward pass (the cell of a recurrent network) makes many such blocks: the n-th of one step is
// like the n-th of the other.
namespace oomdiag {

/// Numbers the allocations of one device at each place of the program, from 0 in each forward pass.
class PlaceCounter {
 public:
  explicit PlaceCounter(size_t contexts) : counts_(contexts + 1) {}

  /// The number of this alloc event.
  uint32_t next(const Event& alloc);

 private:
  struct Count {
    uint32_t pass = 0, allocations = 0;
  };
  std::vector<Count> counts_;  ///< by context
  uint32_t pass_ = 1;
  bool forward_runs_ = false;  ///< something was allocated outside of nodes since the last backward pass began
};

/// What makes two allocations of different steps alike: device, place in the program (context), bytes, which one of its op,
/// and which one of its place (PlaceCounter).
struct AllocationSignature {
  uint8_t device = 0;
  uint32_t context = 0;
  int64_t bytes = 0;
  uint32_t nth_in_op = 0;
  uint32_t nth_at_place = 0;

  /// Equal but for nth_at_place.
  bool is_of_same_place(const AllocationSignature& other) const;
  auto operator<=>(const AllocationSignature&) const = default;
};

/// The nodes that keep each allocation of a graph, so that those of another graph can be found by it. Takes as much
/// memory as the graph has saved tensors.
class SavedAllocations {
 public:
  /// A node keeps this block. Of two blocks with one signature, from passes whose graphs are joined, the younger one counts.
  void add(const Allocation& allocation, const SavingNode& saving_node);
  /// Ends to take in; before it nothing is found.
  void finish();
  /// The nodes that keep an allocation like this one; empty if none does. Where this graph had fewer at that place, those of
  /// the last of them.
  std::vector<SavingNode> find(const Allocation& allocation) const;

 private:
  struct Saved {
    AllocationSignature signature{};
    uint64_t born = 0;
    SavingNode saving_node{};
  };
  std::vector<Saved> saved_;  ///< finished: by signature, the youngest first
};

/// Follows the traversals of the autograd graph.
class Graphs {
 public:
  /// A graph_begin event; `at_oom`: the first that describes a fatal OOM. What it finds is what still counts there.
  void begin_traversal(uint64_t index, bool at_oom);
  /// A forward op made nodes, or the trace ends: the traversed graph has been freed.
  void end_traversal() {
    open_ = false;
    saved_->finish();
  }
  /// A saved_tensor event of this block.
  void save(const Event& event, Allocation& allocation);
  /// Whether that forgets what an earlier graph has saved.
  bool replaces(const Allocation& allocation) const {
    return !allocation.saving_nodes.empty() && allocation.saving_nodes.front().graph != graph_;
  }

  /// The newest traversal, counted from 1.
  uint32_t traversal() const { return traversal_; }
  /// Its graph lives: no forward pass has begun since.
  bool traversed() const { return open_; }
  /// What the newest traversal found.
  const std::shared_ptr<SavedAllocations>& newest() const { return saved_; }
  /// When the traversal of that graph began; blocks that are younger are of a later pass, to which its findings may apply.
  uint64_t began() const { return began_; }

 private:
  uint32_t graph_ = 0, traversal_ = 0;
  bool open_ = false;
  uint64_t began_ = kNoEvent;
  std::shared_ptr<SavedAllocations> saved_ = std::make_shared<SavedAllocations>();
};

}  // namespace oomdiag
