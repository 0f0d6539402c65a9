#pragma once

#include <cstdint>
#include <string>

#include "extension/record/learned_step.h"
#include "extension/record/native_stack.h"
#include "extension/record/python.h"
#include "profiler/event.h"

// Steady training (learned_step.h) between PyTorch and the trace: what a thread does now, and what is to be recorded of
// a request that was not expected.
namespace oomdiag {

struct ThreadState;

/// The request that ended steady training: ops were not watched, so which op made it is found out afterwards. One thread;
/// belongs to steady.cpp.
class StepDivergence {
 public:
  /// `event`, which was written, is not the expected one. Takes the stacks. May run inside the allocator.
  void note(ThreadState& state, const Event& event) noexcept;
  /// Whether it is still to be found out.
  bool is_unresolved() const noexcept { return written_ != nullptr; }
  /// Finds out where the request was made, by its stacks. Outside of the allocator.
  void resolve(ThreadState& state);
  /// Whether the op that made the request may still run.
  bool may_go_on() const noexcept { return is_open_; }
  /// The op `name` starts: if it does so inside of that op, `state` goes back into it.
  void resume(ThreadState& state, const char* name);

 private:
  std::string name_of_node() const;
  void claim_nodes(ThreadState& state, uint32_t context) const noexcept;

  Event* written_ = nullptr;  ///< its event in the trace, null = nothing to find out
  uint64_t sequence_ = 0;
  uint32_t call_id_ = 0;
  Context context_;  ///< as far as it was known, then all of it
  bool in_grad_mode_ = false;
  bool is_open_ = false;
  uint64_t mark_ = 0;                ///< of the Python calls
  uint64_t first_node_ = 0;          ///< the autograd nodes from here on may be of the op
  const char* node_type_ = nullptr;  ///< typeid of the autograd node in which it was made, null = in none
  uint64_t node_sequence_ = kNoNode;
  PythonCalls calls_;
  NativeStack stack_;
};

/// Whether places of allocations are those of a learned step.
bool steady() noexcept;

/// Forgets what was learned. `enable` = false keeps the op callbacks on for good.
void restart_learning(bool enable) noexcept;

/// Reserves space for what this thread will do in a step if it is to be recorded. Outside of the allocator.
void prepare_recording(ThreadState& state);

/// Takes note of an event of a step that this thread writes while ops are watched. Inside the allocator only for allocs.
void learn(ThreadState& state, const Event& event) noexcept;

/// Writes an event that is part of the step, as are requests and reads: in steady training with the place that the learned
/// step gives it; one that is not expected ends it. False if it did. May run inside the allocator, and `state` may be null.
bool write_in_step(ThreadState* state, Event& event) noexcept;

/// The same for a scope that begins: the learned one, null if it is not expected. Outside of the allocator.
const LearnedScope* repeat_scope(ThreadState& state, uint32_t name);

/// The end of an optimizer's step on this thread; `context` names the place. Outside of the allocator.
void end_of_step(ThreadState& state, uint32_t context);

}  // namespace oomdiag
