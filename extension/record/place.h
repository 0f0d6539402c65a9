#pragma once

#include <cstddef>
#include <cstdint>

#include "profiler/event.h"

namespace oomdiag {

class InternCache;

/// Where in the program a thread is: the op, module and line, and the autograd node.
struct WorkPlace {
  Context context;
  uint32_t context_id = 0;
  uint32_t call_id = 0;  ///< of the outermost op
  uint64_t node_sequence = kNoNode;
  uint16_t node_thread = 0;
  bool in_optimizer = false;  ///< in a scope that PyTorch's optimizers open
};

/// What is undone when an op, node or scope ends.
struct Frame {
  const void* call = nullptr;  ///< the RecordFunction that opened it
  WorkPlace outside;           ///< where the thread was, and is again afterwards
  bool is_outermost = false;   ///< the outermost op, or a node
  bool is_builtin = false;     ///< an op of PyTorch's own
  bool is_accumulate = false;  ///< an AccumulateGrad node
  bool runs_node = false;      ///< a node, or the op inside of one that was not watched when it began
  bool is_optimizer_step = false;
  uint32_t scope_name = 0;  ///< of a user scope, else 0

  /// Nothing is to be done at its end but to go back.
  bool is_plain() const { return !is_accumulate && scope_name == 0; }
};

/// Where one thread is, and the calls that led there: frames, the innermost last. What is changed after a frame was entered is
/// undone when it is left, so that outside of all frames the thread is nowhere. One thread; the allocator's hook reads it on
/// that thread.
class Place {
 public:
  static constexpr uint32_t kMaxDepth = 192;

  const WorkPlace& now() const noexcept { return now_; }
  bool in_node() const noexcept { return now_.node_sequence != kNoNode; }
  /// For what is known of the innermost frame, and of what runs outside of all frames.
  WorkPlace& change() noexcept { return now_; }

  /// Whether no frame can be entered.
  bool is_full() const noexcept { return depth_ == kMaxDepth; }
  /// The frame that was entered last and not left; null if there is none.
  const Frame* innermost() const noexcept { return depth_ == 0 ? nullptr : frames_ + depth_ - 1; }
  /// Not while it is full.
  Frame& enter(const void* call) noexcept;
  /// Ends the innermost frame.
  void leave() noexcept { now_ = frames_[--depth_].outside; }
  /// Ends the frame of `call` and copies it to `ended`. Calls may end out of order: what is open inside of the frame stays open,
  /// and is no longer inside of it when it ends. False for a call that has no frame, as it began before recording did.
  bool leave(const void* call, InternCache& names, Frame& ended);

  /// A node runs that was not entered. What adopts it is a frame, which then `runs_node`, or calls the next two around it.
  void adopt_node(uint32_t name, uint64_t sequence, uint16_t thread) noexcept;
  void begin_adopted_node() noexcept { has_adopted_ = true; }
  void end_adopted_node() noexcept;
  /// How many autograd nodes run on this thread, one inside of another.
  size_t running_nodes() const noexcept;

 private:
  void erase_out_of_order(uint32_t index, const Frame& ended, InternCache& names);

  WorkPlace now_;
  uint32_t depth_ = 0;
  bool has_adopted_ = false;  ///< a node runs that has no frame
  Frame frames_[kMaxDepth];
};

}  // namespace oomdiag
