#pragma once

#include "profiler/replay/history.h"

// An OOM cuts its step short. What the step would have needed is that of the step before, if that one was whole and like it:
//
//   step 1   ──┬── forward ── backward ── optimizer (makes its state) ──┬
//   step 2   ──┴── forward … OOM                                         the state lives from the beginning on
namespace oomdiag {

/// Whether the step that was cut short did what `whole` did: of what it allocated, and of the requests that failed, there is the
/// same in `whole`, from the same place and of the same size. Differences of a twentieth of the bytes are none.
bool is_like(const StepAllocations& cut, const StepAllocations& whole);

/// The step that was cut short as if it had run to its end: `whole`, the step before it, with what that one left behind. What
/// was made once (optimizer state) is there from the beginning; what is made anew in each step (gradients, outputs that a
/// variable holds) lives on up to where the step that was cut short freed it, else up to where it is made again, or that step failed if
/// that is later.
StepAllocations run_on(const StepAllocations& cut, const StepAllocations& whole);

}  // namespace oomdiag
