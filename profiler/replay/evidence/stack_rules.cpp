#include "profiler/replay/evidence/stack_rules.h"

#include <array>

#include "profiler/replay/history.h"

// What does a block hold, if all that was recorded are the stacks of its alloc and its free, as in PyTorch's own memory
// history? Two tables say so. The first finds frames that say something. The second reads what was found, and what
// became of the block: a tensor of forward that a node of backward frees was saved for it, a tensor of backward that
// outlives it is a gradient, one of an optimizer's step that outlives that is its state. The confidence was measured
// against recordings of the same processes (tests/causes/categories.py):
//
//   high     the frame or the free says it
//   medium   it follows from the order of things; exceptions are known
//   low      the best guess

namespace oomdiag {
namespace {

struct FrameRow {
  uint32_t mark;
  bool python;
  std::string_view function;  ///< its end; of C++ a part of it
  std::string_view file;      ///< a part of its path
};

constexpr auto kFrames = std::to_array<FrameRow>({
    {kCallsModule, true, "call_impl", "/torch/nn/modules/module.py"},
    {kMakesWeights, true, "_apply", "/torch/nn/modules/module.py"},
    {kMakesWeights, true, "load_state_dict", ""},
    {kMakesWeights, true, "from_pretrained", ""},
    {kMakesWeights, true, "_load_pretrained_model", ""},
    {kMakesWeights, true, "__init__", "/torch/nn/modules/"},
    {kMakesWeights, true, "reset_parameters", ""},
    {kMakesWeights, true, "", "/torch/nn/init.py"},
    {kMakesWeights, true, "", "/torch/nn/parameter.py"},
    {kMakesWeights, true, "", "/torch/distributed/fsdp/_flat_param.py"},
    {kMakesBuckets, true, "_ddp_init_helper", "/torch/nn/parallel/distributed.py"},
    {kConvolves, true, "_conv_forward", "/torch/nn/modules/conv.py"},
    {kConvolves, true, "forward", "/torch/nn/modules/rnn.py"},
    {kInConstructor, true, "__init__", ""},
    {kStepsOptimizer, true, "step", "/torch/optim/"},
    {kStepsOptimizer, true, "step", "/bitsandbytes/optim/"},
    {kStepsOptimizer, true, "step", "/apex/optimizers/"},
    {kStepsOptimizer | kMakesState, true, "_init_group", "/torch/optim/"},
    {kStepsOptimizer | kMakesState, true, "init_state", "/bitsandbytes/optim/"},
    {kClearsGradients, true, "zero_grad", ""},
    {kRecomputes, true, "", "/torch/utils/checkpoint.py"},
    {kAccumulates, false, "torch::autograd::AccumulateGrad::apply", ""},
});

struct StackRule {
  uint32_t all, none;  ///< marks
  uint8_t fates;       ///< one of them
  Category category;
  Confidence confidence;
};

constexpr uint8_t kKept = kOutlivesStep | kLivesOn;
constexpr auto kRules = std::to_array<StackRule>({
    // Frames that leave no doubt.
    {kMakesBuckets, 0, kAnyFate, Category::gradient, Confidence::medium},
    {kAccumulates, 0, kDiedInCall, Category::temporary, Confidence::medium},
    {kAccumulates, 0, kAnyFate, Category::gradient, Confidence::high},
    {kKeptWorkspace, 0, kKept, Category::workspace, Confidence::medium},

    // An optimizer's step: what outlives it is state. Of one that has not ended, only what was made as state.
    {kStepsOptimizer, kInBackward, kDiedInOptimizer | kDiedInCall, Category::temporary, Confidence::high},
    {kMakesState, kInBackward, kAnyFate, Category::optimizer_state, Confidence::high},
    {kStepsOptimizer | kStateUnfinished, kInBackward, kAnyFate, Category::temporary, Confidence::medium},
    {kStepsOptimizer, kInBackward, kAnyFate, Category::optimizer_state, Confidence::high},

    // Backward. What checkpointing computes again is an activation; it is a gradient that outlives its step or that
    // zero_grad frees.
    {kInBackward | kFrameless, 0, kDiedInCall, Category::workspace, Confidence::low},
    {kInBackward | kMayBeWorkspace, 0, kDiedInCall, Category::workspace, Confidence::medium},
    {kInBackward, 0, kDiedInCall, Category::temporary, Confidence::medium},
    {kInBackward | kRecomputes | kCallsModule, 0, kDiedInBackward | kLivesOn, Category::activation, Confidence::medium},
    {kInBackward, 0, kDiedWithGradients, Category::gradient, Confidence::high},
    {kInBackward, 0, kOutlivesStep, Category::gradient, Confidence::medium},
    {kInBackward, 0, kDiedInBackward, Category::activation_gradient, Confidence::high},
    {kInBackward, 0, kDiedElsewhere, Category::activation_gradient, Confidence::low},
    {kInBackward, 0, kLivesOn, Category::activation_gradient, Confidence::low},

    // Weights: made once, outside of any call of a module, and kept.
    {kMakesWeights, kCallsModule, kDiedInCall, Category::temporary, Confidence::medium},
    {kMakesWeights, kCallsModule, kAnyFate, Category::parameter, Confidence::high},
    {kInPython | kInConstructor | kBeforeForward, kCallsModule, kKept, Category::parameter, Confidence::low},

    // Forward.
    {kFramesKnown | kMayBeWorkspace, 0, kDiedInCall, Category::workspace, Confidence::medium},
    {kFramesKnown, 0, kDiedInCall, Category::temporary, Confidence::medium},
    {kCallsModule, 0, kDiedInBackward, Category::activation, Confidence::high},
    {kInPython | kBeforeForward, kCallsModule, kDiedInBackward, Category::input, Confidence::medium},
    {kFramesKnown, 0, kDiedInBackward, Category::activation, Confidence::medium},
    {kCallsModule | kSavedBefore, 0, kLivesOn, Category::activation, Confidence::medium},
    {kCallsModule, 0, kLivesOn, Category::activation, Confidence::low},
    {kCallsModule, 0, kAnyFate, Category::output, Confidence::medium},

    // Outside of modules: the batch comes before them, the loss after them. Where no module is called this is not
    // known.
    {kInPython | kModulesKnown | kBeforeForward | kBringsData, 0, kAnyFate, Category::input, Confidence::medium},
    {kInPython | kModulesKnown | kBeforeForward, 0, kKept, Category::input, Confidence::low},
    {kInPython | kSavedBefore, kBeforeForward, kLivesOn, Category::activation, Confidence::medium},
    {kInPython | kModulesKnown, kBeforeForward, kAnyFate, Category::output, Confidence::low},
});

bool is_said(const FrameRow& row, std::string_view function, std::string_view file, bool python) {
  if (row.python != python) return false;
  if (!python) return function.find(row.function) != function.npos;
  return function.ends_with(row.function) && file.find(row.file) != file.npos;
}

}  // namespace

uint32_t marks_of(std::string_view function, std::string_view file, bool python) {
  uint32_t marks = 0;
  if (python) marks = kInPython;
  for (const FrameRow& row : kFrames) {
    if (is_said(row, function, file, python)) marks |= row.mark;
  }
  return marks;
}

StackVerdict categorise_by_stacks(uint32_t marks, uint8_t fate) {
  for (const StackRule& rule : kRules) {
    const bool holds = (marks & rule.all) == rule.all && (marks & rule.none) == 0 && (fate & rule.fates) != 0;
    if (holds) return {rule.category, rule.confidence};
  }
  return {};
}

}  // namespace oomdiag
