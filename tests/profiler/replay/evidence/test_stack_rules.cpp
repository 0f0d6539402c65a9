#include "profiler/replay/evidence/stack_rules.h"
#include "tests/catch.h"

// What the rules are worth is measured with real programs: tests/causes/categories.py.

using namespace oomdiag;

namespace {

Category category(uint32_t marks, uint8_t fate) { return categorise_by_stacks(kFramesKnown | marks, fate).category; }

}  // namespace

TEST_CASE("frames say what is done in them", "[stacks]") {
  CHECK(marks_of("_call_impl", "/x/torch/nn/modules/module.py", true) == (kInPython | kCallsModule));
  CHECK(marks_of("_apply", "/x/torch/nn/modules/module.py", true) == (kInPython | kMakesWeights));
  CHECK(marks_of("_init_group", "/x/torch/optim/adam.py", true) == (kInPython | kStepsOptimizer | kMakesState));
  CHECK(marks_of("step", "/home/me/train.py", true) == kInPython);
  CHECK(marks_of("torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)", "", false) == kAccumulates);
}

TEST_CASE("what becomes of a block shows what it held", "[stacks]") {
  CHECK(category(kInPython | kCallsModule, kDiedInBackward) == Category::activation);
  CHECK(category(kInPython | kCallsModule, kDiedElsewhere) == Category::output);
  CHECK(category(kInPython | kCallsModule | kMayBeWorkspace, kDiedInCall) == Category::workspace);
  CHECK(category(kInBackward, kDiedInBackward) == Category::activation_gradient);
  CHECK(category(kInBackward, kDiedWithGradients) == Category::gradient);
  CHECK(category(kInPython | kStepsOptimizer, kOutlivesStep) == Category::optimizer_state);
  CHECK(category(kInPython | kStepsOptimizer, kDiedInOptimizer) == Category::temporary);
  CHECK(category(kInPython | kMakesWeights | kBeforeForward, kOutlivesStep) == Category::parameter);
}

TEST_CASE("of a stack without frames nothing is said", "[stacks]") {
  for (const uint8_t fate : {kDiedInCall, kDiedInBackward, kDiedElsewhere, kOutlivesStep, kLivesOn}) {
    CHECK(categorise_by_stacks(kBeforeForward | kBringsData, fate) == StackVerdict{});
  }
  CHECK(category(kBeforeForward | kBringsData, kOutlivesStep) == Category::unknown);  // of C++ only
}
