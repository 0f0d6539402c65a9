#pragma once

#include "profiler/replay/history.h"

// Where no whole step was seen, some of what the step would still have taken is known all the same. It makes a lower bound:
//
//   layers      of "h.0" … "h.23" thirteen were called: the others keep what the last one with the same parameters keeps
//   gradients   each parameter that an optimizer has will have one
//   state       Adam makes two tensors of each parameter's size, and so on by the optimizer's class
namespace oomdiag {

/// Bytes of state per byte of parameters that an optimizer of this class makes at least; 0 where it is not known.
/// `group`: "AdamW, group 1", as LiveBlock::group has it.
double least_state(std::string_view group);

/// `cut`, the step that failed, and what is known to come after. What the step itself made ends where its optimizer begins.
struct KnownRest {
  StepAllocations step_allocations{};
  uint32_t forward_end = 0;     ///< position from which on the rest of forward is there
  int64_t modules_to_come = 0;  ///< with parameters of their own, that the step has not called yet
  int64_t gradient_bytes = 0;   ///< not made yet; likewise the next
  int64_t state_bytes = 0;      ///< in one block, the last of them

  bool operator==(const KnownRest&) const = default;
};
KnownRest add_known_rest(const StepAllocations& cut, const MemoryState& state);

}  // namespace oomdiag
