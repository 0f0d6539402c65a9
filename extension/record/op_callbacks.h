#pragma once

#include <cstdint>

namespace oomdiag {

struct ThreadState;

/// Which callbacks run. `recording` is the whole recorder, `every_step` the same without its steady mode (steady.h); the
/// others are for measuring.
enum class OpCallbacks { none, empty, recording, every_step };

/// Installs them for all threads, replacing what was installed. Not in a callback.
void install_op_callbacks(OpCallbacks which);

/// A range of the user's own (NVTX), nested like a scope; a null name ends the innermost one of this thread.
void enter_or_leave_range(const char* name) noexcept;

/// Switches the callback that remembers the newest outputs on or off. It is the costlier half (PyTorch boxes the outputs
/// of every op), so it runs only where an OOM in forward is near. Any thread, also inside callbacks.
void watch_outputs(bool on);

/// Switches the callbacks at every op and autograd node on, or in steady training off; user scopes are watched always. Any
/// thread, also inside callbacks and in the allocator.
void watch_ops_as_needed();

/// The ContextFlags of the autocast region that this thread is in; 0 outside of any.
uint32_t autocast_flags() noexcept;

/// Makes the autograd node that runs on this thread known to its state for as long as this lives, also if ops were not
/// watched when it began.
class RunningNode {
 public:
  explicit RunningNode(ThreadState& state);
  ~RunningNode();
  RunningNode(const RunningNode&) = delete;
  RunningNode& operator=(const RunningNode&) = delete;

 private:
  ThreadState& state_;
  bool adopted_;
};

}  // namespace oomdiag
