#pragma once

#include <cstdint>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Follows a trace and knows the step and the phase of its events. The phase of an allocation is, first rule that holds:
///   backward   an autograd node runs (also what checkpointing computes again there)
///   optimizer  inside a scope "Optimizer.step…"
///   setup      before the first forward op (the first op that made autograd nodes and does not merely move tensors, or the
///              first of the module that it is in)
///   forward    gradients are enabled, or it sits in a module, or the forward pass has begun and no backward yet
///   other      the rest: logging, zero_grad, loading data between steps
/// Steps are optimizer steps, counted from 1 (0 in setup); without optimizer scopes a step ends with its backward pass, and
/// where nothing is trained steps are iterations, see iterations.h.
class Phases {
 public:
  Phases(const Trace& trace, const TracePrescan& prescan);

  /// Takes the next event; afterwards the others speak about that event.
  void advance(const Event& event, uint64_t index) {
    const Flags& at = flags(event.context);
    const bool begins = iterations_.begins(event, at.in_module);
    if (index == prescan_.first_forward) {
      step_ = prescan_.first_step;
    } else if (begins && step_ > 0) [[unlikely]] {
      begin_next_step();
    }
    if (next_step_ < prescan_.step_begins.size() && index == prescan_.step_begins[next_step_]) begin_next_step();
    if (event.kind == EventKind::alloc && (in_node(event) || at.optimizer)) forward_open_ = false;
    if (event.kind == EventKind::nodes_created && !at.in_node) forward_open_ = true;
    if (event.kind == EventKind::scope_end) end_scope(event);
  }

  uint32_t step() const { return step_; }
  /// The phase of an alloc or out_of_memory event.
  Phase phase_of(const Event& event) const;

 private:
  struct Flags {
    bool optimizer = false, grad_mode = false, in_module = false, in_node = false;
  };
  const Flags& flags(uint32_t context) const { return flags_[context < flags_.size() ? context : 0]; }
  void end_scope(const Event& event);
  void begin_next_step();

  const TracePrescan& prescan_;
  IterationFollower iterations_;
  std::vector<Flags> flags_;           ///< by context
  std::vector<bool> optimizer_names_;  ///< by name
  size_t next_step_ = 0;
  bool known_ = true;  ///< something marks steps and forward ops
  uint32_t step_ = 0;
  bool forward_open_ = false;  ///< the step's forward pass has begun and no backward yet
};

}  // namespace oomdiag
