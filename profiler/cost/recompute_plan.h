#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

// Which blocks of a model run again in backward, so that a step stays within a budget and takes as little time as can be. Numbers
// only: what a block frees, and when, is computed elsewhere (profiler/explain/fixes/checkpointing.cpp). What several blocks free adds up.
//
//   bytes  as it is        ╱╲            block i checkpointed       ╱▔╲╱╲
//                        ╱    ╲                                   ╱     ╲╲      recomputed as backward comes to i
//                      forward backward                         forward backward
namespace oomdiag {

/// Blocks that are alike. Those that run again are the first ones: backward comes to them last, when least else is there.
struct BlockClass {
  double block_ns = 0;  ///< of the forward of one
  /// By block and position of the step: the bytes that are free if it is checkpointed; negative where it is recomputed.
  std::vector<std::vector<int64_t>> freed{};
};

struct RecomputeProblem {
  std::vector<int64_t> bytes{};  ///< in use at each position of a step without checkpoints
  double step_ns = 0;
  std::vector<BlockClass> classes{};
};

struct RecomputePlan {
  std::vector<std::size_t> counts{};  ///< of blocks that run again, by class
  int64_t peak_bytes = 0;
  double step_ns = 0;

  bool operator==(const RecomputePlan&) const = default;
};

/// The plan of the least time that the search finds with a peak of at most `budget_bytes`; nullopt where it finds none. Greedy
/// by bytes per nanosecond at the highest position, then single exchanges: in 40 random problems of 4096 plans at most 0.7 % of
/// a step slower than the best (tests/profiler/cost/test_recompute_plan.cpp).
std::optional<RecomputePlan> find_cheapest_plan(const RecomputeProblem& problem, int64_t budget_bytes);

/// No choice of blocks within the budget takes less, also of others than the first ones of each class: the largest of the linear
/// relaxations, one for each position above the budget, with fractions of blocks and nothing recomputed; of at most 4096 plans that of
/// whole blocks. nullopt where not even all blocks are enough: no plan is within the budget.
std::optional<double> lower_bound_ns(const RecomputeProblem& problem, int64_t budget_bytes);

/// Peak against time: plans of which none is better in both than another, the fastest first.
std::vector<RecomputePlan> list_pareto_front(const RecomputeProblem& problem);

}  // namespace oomdiag
