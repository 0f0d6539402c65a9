#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/experiments/experiment.h"
#include "cli/experiments/fix.h"

// oomdiag fix --budget, fit --fastest: the fastest plan that fits. Values here, the stages in fix_plan*.cpp.
namespace oomdiag {

/// Changes of the whole program, and blocks that run again in backward.
struct FixPlan {
  MeasuredFix fix{};                      ///< the changes, and what a run of them showed
  int64_t predicted_peak_bytes = 0;       ///< allocated
  std::optional<int64_t> predicted_ns{};  ///< modelled, of as many samples as a step has before
  bool was_run = false;                   ///< with all its changes; else all but `fix.changes` is computed
  bool on_gpu = false;                    ///< that run was on the GPU of the budget: it proves whether it fits

  bool is_proved() const { return on_gpu && fix.helps(); }
  int64_t peak_bytes() const { return fix.measured_peak_bytes.value_or(predicted_peak_bytes); }
};

/// Its changes; "as it is" where there are none.
std::string label_of(const FixPlan& plan);

/// The modelled time of as many samples as a step has before: of the run where it was made, else predicted.
std::optional<int64_t> time_of(const FixPlan& plan, const Before& before, std::optional<int64_t> batch);

struct FoundPlans {
  Before before{};
  std::vector<FixPlan> plans{};            ///< the front of peak against time and all that was run, the fastest first
  std::optional<std::size_t> fastest{};    ///< of those that are proved to fit
  std::optional<std::size_t> same_sums{};  ///< likewise, of those that compute the same numbers
  /// No choice of blocks with the other changes of `fastest`, of those that take less than one that ran out, is faster by a
  /// larger share.
  std::optional<double> gap{};
  std::optional<int64_t> batch{};  ///< samples of a step before, where they are known
  std::string no_blocks{};         ///< why no checkpoints were planned
  std::size_t runs = 0;
  double seconds = 0;
  int interrupted_by = 0;  ///< signal; what was measured by then stands
};

/// Runs the program as it is, with each change that is for the whole program, and the plans that are computed from these to fit.
/// Throws Interrupted where not even the program as it is was run.
FoundPlans search_plans(const Target& target, Experiments& experiments,
                        const std::function<void(std::size_t, std::size_t)>& on_done);

std::string to_text(const FoundPlans& found, const Target& target, const std::string& command);
std::string to_json(const FoundPlans& found, const Target& target, const std::string& command);

}  // namespace oomdiag
