#include "profiler/explain/step/step_model.h"

#include <algorithm>

#include "profiler/explain/step/what_if.h"
#include "profiler/replay/history.h"

namespace oomdiag {

bool trains(const StepModel& model) {
  const Allocations& blocks = model.blocks;
  if (model.only_infers) return false;
  if (model.has_backward) return true;
  return std::any_of(blocks.begin(), blocks.end(), [](const StepAllocation& block) {
    return block.category == Category::activation || block.category == Category::gradient;
  });
}

bool is_without_backward(const StepModel& model) {
  return model.whole && find_backward(model.blocks) == StepAllocation::kNever;
}

bool may_train(const StepModel& model) { return trains(model) || (!model.whole && !model.only_infers); }

bool has_bfloat16(int compute_major) { return compute_major == 0 || compute_major >= 8; }

}  // namespace oomdiag
