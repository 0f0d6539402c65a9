#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/experiments/fit.h"
#include "cli/launch/ranks.h"
#include "cli/python/install.h"
#include "profiler/report/report.h"

// fit over the plan of a job: a variable called world is its number of ranks, others are options of the program (tp,
// pp, batch, …). Every combination is tried, by a run of each kind of its ranks (run_ranks.h): the worst of them
// decides. If the first variable is a range, its largest value that fits is searched in each plan of the others.

namespace oomdiag {

inline constexpr const char* kWorld = "world";

/// What came of one combination.
struct Plan {
  Values values;
  std::string outcome = "failed";  ///< ok | out_of_memory | failed
  std::string why{};               ///< it failed for another reason than memory
  int worst_rank = 0;              ///< that ran out, else the one with the highest peak
  int64_t allocated_bytes = 0, reserved_bytes = 0;
  int64_t needed_bytes = 0;          ///< as of an Experiment
  int64_t available_bytes = 0;       ///< what PyTorch may take of the GPU
  std::string place{};               ///< where it ran out
  std::optional<int64_t> step_ns{};  ///< modelled: of one rank's step
  int64_t flops = 0;                 ///< of that step

  /// FLOPs in a second: of plans that do the same work the fastest has most of them.
  std::optional<double> flops_per_second() const;
  bool fits() const { return outcome == "ok"; }
  bool operator==(const Plan&) const = default;
};

/// Whether a job is planned.
bool is_plan(const std::vector<Variable>& variables);

/// The plans to be made, and what is searched in each.
struct Planning {
  std::vector<Values> plans;
  std::optional<Variable> searched{};
};

/// Every combination of the values of all variables but the one that is searched. A range of worlds is one of powers of two.
/// Throws Error(usage) where they are too many.
Planning list_plans(std::vector<Variable> variables);

Plan read_plan(const Values& values, const Report& report);

/// Runs them and gives each to `take` when it is over; of a search the plan with the value that was found, or with the
/// least. Throws Interrupted.
void run_plans(const Planning& planning, const FitRequest& request, const RankOptions& host, const Install& install,
               const std::function<void(Plan)>& take);

/// The same runs as commands for other machines, one a line, each word quoted for a shell; each writes its report into the
/// folder. `options` are those of `oomdiag run`.
std::string print_jobs(const std::vector<Values>& plans, const FitRequest& request,
                       const std::vector<std::string>& options, const std::string& folder);

/// Reads what these have written. Throws Error(input).
std::vector<Plan> collect_plans(const std::filesystem::path& folder);

/// The plan of the smallest world that fits, and of these of the lowest peak; null if none does. With `searched`, the name of
/// a variable, before all the one of its largest value.
const Plan* best_plan(const std::vector<Plan>& plans, const std::string& searched = "");

/// The plan that fits whose ranks compute most in a second, by the time model; null where no time is known.
const Plan* fastest_plan(const std::vector<Plan>& plans);

std::string plans_text(const std::vector<Plan>& plans, const std::string& searched = "");
std::string plans_json(const std::vector<Plan>& plans, const std::string& searched = "");

}  // namespace oomdiag
