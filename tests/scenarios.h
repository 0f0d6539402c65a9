#pragma once

#include "profiler/explain/explain.h"
#include "tests/event_builder.h"

namespace oomdiag {

/// Two layers (conv1, relu1), Adam, one parameter each of 4 MiB; a step of `act` bytes per activation. The events are
/// those that the recorder writes for such a loop.
struct SmallTraining {
  int64_t activation_bytes = 64_MiB;
  std::string shape = "[64, 32, 64, 128] float32";

  void setup(EventBuilder& trace) const;
  void forward(EventBuilder& trace, uint64_t first_node) const;
  void backward(EventBuilder& trace, uint64_t first_node) const;
  void optimizer(EventBuilder& trace, bool first) const;
  void zero_grad(EventBuilder& trace) const;
};

/// Two whole steps that fit.
Trace training_that_fits();
/// The second step's backward requests a gradient that the GPU has no memory for.
Trace oom_in_backward();
/// The forward pass of step 1 is too large.
Trace oom_in_forward();
/// Adam's state does not fit.
Trace oom_in_optimizer();

/// A GPU with so much memory.
inline Device gpu_of(int64_t total_bytes, int64_t context_bytes = 0) {
  Device gpu;
  gpu.total_bytes = total_bytes;
  gpu.context_bytes = context_bytes;
  return gpu;
}

/// The cause of a failure at a hand-made state.
inline Cause find_cause(const OutOfMemory& failure, const MemoryState& state, const AllocatorSettings& settings,
                        const Device& device, const std::vector<Growth>& growths = {}, const StepNeed& need = {}) {
  DeviceHistory history;
  history.failure = failure;
  history.state = state;
  return find_cause(collect_facts(history, settings, device, growths, need), state);
}

}  // namespace oomdiag
