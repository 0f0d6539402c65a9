#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/step/what_if.h"
#include "profiler/replay/allocator/settings.h"

namespace oomdiag {

/// What the predictions of fixes start from: one step, and what is known of its program and its device.
struct StepModel {
  Allocations blocks{};         ///< allocations of the step
  bool whole = true;            ///< of a complete step; else what is known of one, and peaks are lower bounds
  uint32_t forward_end = 0;     ///< where forward ends in a step that is not complete
  int64_t peak_bytes = 0;       ///< of the run; after an OOM that of the step, had it gone on
  int64_t available_bytes = 0;  ///< what PyTorch may take of the device
  int64_t private_pool_cached_bytes =
      0;                           ///< of it: cached in private pools; the step may or may not be able to reuse it
  bool is_fragmented = false;      ///< the request failed for want of a free block of its size
  std::optional<int64_t> batch{};  ///< where it is known
  int64_t grown_bytes = 0, grown_per_step = 0;  ///< from step to step
  uint32_t last_step = 0;                       ///< that the growth was measured to
  std::string growing_place{};                  ///< "train.py:11", or what else is known of it
  bool leaks = false;                           ///< growth is why it failed, or why it will
  int64_t other_peak_bytes = 0;                 ///< of all other steps that are known
  bool has_backward = true;                     ///< the program ran backward, as far as was seen
  bool only_infers = false;  ///< the pass that failed wants no gradients, or complete steps went by without backward
  AllocatorSettings settings{};
  int compute_major = 0;         ///< of the device, 0 = not known
  std::string_view optimizer{};  ///< class of the one that has most parameters, "AdamW", or empty
  std::string_view framework{};  ///< that drives the training (framework_lines.h), or empty
  bool sharded = false;          ///< parameters are shared with other ranks already
};

/// Whether the program trains: where backward was not seen, what autograd keeps shows it.
bool trains(const StepModel& model);
/// … or it is not known, as no complete step was seen.
bool may_train(const StepModel& model);
/// No backward follows the forward pass of this step, as one sees: what makes it smaller in training does not help.
bool is_without_backward(const StepModel& model);

/// Whether GPUs of this compute capability have bfloat16: from Ampere, 8.0, on. 0 = not known, taken to have it.
bool has_bfloat16(int compute_major);

/// A step as a fix would leave it. What the fix's row says for all programs is left empty.
struct ModifiedStep {
  Allocations blocks{};
  std::string variant{};                        ///< behind the id of the row: "2" of "fsdp_2"
  std::string label{};                          ///< in place of the row's
  std::vector<std::string> modules{};           ///< that it is about, where it names some
  std::vector<std::string> lines{};             ///< in place of the row's
  std::string costs{};                          ///< in place of the row's
  std::optional<AllocatorSettings> settings{};  ///< that the allocator would have
  int64_t passes = 1;                           ///< of which each step has so many, each of these sizes
  int64_t floor_bytes = 0;                      ///< what other steps need, where it changes none of them
  bool at_least = false;                        ///< the rule leaves something out: its peak is a lower bound

  bool operator==(const ModifiedStep&) const = default;
};

}  // namespace oomdiag
