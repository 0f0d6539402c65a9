#include "profiler/replay/steps/phases.h"

#include "profiler/event.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

Phases::Phases(const Trace& trace, const TracePrescan& prescan)
    : prescan_(prescan),
      iterations_(prescan.iterations),
      known_(!trace.process.snapshot || prescan.first_forward != TracePrescan::kNever) {
  flags_.reserve(trace.contexts.size() + 1);
  for (const Context& context : trace.contexts) {
    flags_.push_back({.optimizer = is_optimizer_step(trace.name(context.scope)),
                      .grad_mode = (context.flags & kGradMode) != 0,
                      .in_module = context.module != 0 && !trace.process.snapshot,
                      .in_node = context.node != 0});
  }
  if (flags_.empty()) flags_.emplace_back();
  optimizer_names_ = find_optimizer_names(trace);
}

Phase Phases::phase_of(const Event& event) const {
  const Flags& at = flags(event.context);
  if (in_node(event) || at.in_node) return Phase::backward;
  if (at.optimizer && !at.in_module) return Phase::optimizer;  // a closure calls the model once more
  if (!known_) return Phase::other;
  if (step_ == 0) return Phase::setup;
  return at.grad_mode || at.in_module || forward_open_ ? Phase::forward : Phase::other;
}

void Phases::end_scope(const Event& event) {
  const bool optimizer = event.detail < optimizer_names_.size() && optimizer_names_[event.detail];
  if (optimizer && step_ > 0) begin_next_step();
}

void Phases::begin_next_step() {
  if (!prescan_.has_optimizer_scopes) ++next_step_;
  forward_open_ = false;
  ++step_;
}

}  // namespace oomdiag
