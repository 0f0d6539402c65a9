#pragma once

#include <cstdint>
#include <string_view>

#include "profiler/replay/history.h"

namespace oomdiag {

/// What is known of an allocation of which only stacks and times were recorded. The first ones are said by frames, see
/// marks_of; the others by the replay.
enum StackMark : uint32_t {
  kCallsModule = 1 << 0,     ///< inside of a call of an nn.Module
  kMakesWeights = 1 << 1,    ///< a module is made, moved or loaded
  kInConstructor = 1 << 2,   ///< inside of an __init__
  kStepsOptimizer = 1 << 3,  ///< inside of an optimizer's step
  kMakesState = 1 << 4,      ///< … where it makes its state
  kClearsGradients = 1 << 5,
  kAccumulates = 1 << 6,   ///< inside of AccumulateGrad
  kRecomputes = 1 << 7,    ///< inside of torch.utils.checkpoint
  kMakesBuckets = 1 << 8,  ///< DistributedDataParallel's, in which gradients lie
  kConvolves = 1 << 9,     ///< inside of a module whose operator asks for workspace
  kInPython = 1 << 10,     ///< there is a frame of Python

  kFramesKnown = 1 << 11,      ///< there is a frame, or it is known that backward has none
  kInBackward = 1 << 12,       ///< inside of an autograd node
  kBeforeForward = 1 << 13,    ///< before the first module call of its step, or in no step
  kBringsData = 1 << 14,       ///< its operator copies or creates; where operators are not known it may
  kMayBeWorkspace = 1 << 15,   ///< not the first of an operator that asks for workspace
  kKeptWorkspace = 1 << 16,    ///< what cuBLAS keeps, by its size
  kSavedBefore = 1 << 17,      ///< others of the same place were freed by backward
  kStateUnfinished = 1 << 18,  ///< the optimizer's step that made it had not ended
  kModulesKnown = 1 << 20,     ///< some stack calls a module: what is made in none is known to be
  kFrameless = 1 << 19,        ///< of a thread of the autograd engine, which has no frames of Python
};

/// What became of an allocation, one bit each.
enum StackFate : uint8_t {
  kDiedInCall = 1,         ///< freed by the call that made it, before another one allocated
  kDiedInBackward = 2,     ///< freed by an autograd node
  kDiedInOptimizer = 4,    ///< freed inside of the optimizer's step that made it
  kDiedWithGradients = 8,  ///< freed by zero_grad or an optimizer
  kDiedElsewhere = 16,     ///< freed by other code
  kOutlivesStep = 32,      ///< lives when its step has ended
  kLivesOn = 64,           ///< lives at the end of the history, or at the failure, in its step
  kAnyFate = 127,
};

struct StackVerdict {
  Category category = Category::unknown;
  Confidence confidence = Confidence::none;

  bool operator==(const StackVerdict&) const = default;
};

/// What a frame says, as StackMark. `file`: with slashes; of C++ frames what `function` says alone counts.
uint32_t marks_of(std::string_view function, std::string_view file, bool python);

/// The category of the first rule that holds; nothing where no frames were recorded.
StackVerdict categorise_by_stacks(uint32_t marks, uint8_t fate);

}  // namespace oomdiag
