#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"

// What the files of fixes have in common with each other and with the rules of reasons.
namespace oomdiag {

/// The largest batch with which the step gets through the allocator. `batch` is its own: the result is below it only where the
/// step's peak is more than there is, and equal to it where no bytes of the step follow it. 0 where the step is too long to simulate.
int64_t find_largest_batch(const StepModel& model, int64_t batch);

/// The list of modules that makes most of the step, as Python: "model.blocks"; "model.layers" where none is known.
std::string name_layers(const Allocations& blocks);

/// A complete step with the modules of these paths checkpointed, each by itself; none of them is inside of another.
Allocations checkpoint_paths(const Allocations& blocks, std::span<const std::string> paths);

}  // namespace oomdiag
