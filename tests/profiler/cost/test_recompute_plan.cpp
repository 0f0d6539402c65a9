#include <algorithm>
#include <random>

#include "profiler/cost/recompute_plan.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

struct TestClass {
  std::size_t blocks = 0;
  int64_t saved_bytes = 0;
  double block_ns = 0;
};

/// Blocks one after the other: forward keeps `saved_bytes` of each, backward frees them in reverse order. A checkpointed one is free
/// from its forward on, and there again while backward is at it.
RecomputeProblem make_problem(const std::vector<TestClass>& classes, int64_t fixed_bytes, double step_ns) {
  std::size_t all = 0;
  for (const TestClass& one : classes) all += one.blocks;
  const std::size_t end = 2 * all + 1;
  RecomputeProblem problem{.bytes = std::vector<int64_t>(end, fixed_bytes), .step_ns = step_ns};
  std::size_t at = 0;
  for (const TestClass& one : classes) {
    BlockClass made{.block_ns = one.block_ns};
    for (std::size_t i = 0; i < one.blocks; ++i, ++at) {
      const std::size_t backward = 2 * all - at;  // one position for each block, the last one's first
      std::vector<int64_t> freed(end);
      for (std::size_t p = at + 1; p <= backward; ++p) {
        problem.bytes[p] += one.saved_bytes;
        if (p < backward) freed[p] = one.saved_bytes;
      }
      made.freed.push_back(freed);
    }
    problem.classes.push_back(made);
  }
  return problem;
}

/// What the first `counts` blocks of each class, checkpointed, make of the peak and the time.
RecomputePlan evaluate(const RecomputeProblem& problem, const std::vector<std::size_t>& counts) {
  RecomputePlan plan{.counts = counts, .step_ns = problem.step_ns};
  std::vector<int64_t> bytes = problem.bytes;
  for (std::size_t of = 0; of < counts.size(); ++of) {
    const BlockClass& one = problem.classes[of];
    plan.step_ns += static_cast<double>(counts[of]) * one.block_ns;
    for (std::size_t block = 0; block < counts[of]; ++block) {
      for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] -= one.freed[block][i];
    }
  }
  plan.peak_bytes = std::ranges::max(bytes);
  return plan;
}

/// The fastest of all plans.
std::optional<RecomputePlan> enumerate(const RecomputeProblem& problem, int64_t budget_bytes) {
  std::optional<RecomputePlan> best;
  std::vector<std::size_t> counts(problem.classes.size());
  while (true) {
    const RecomputePlan plan = evaluate(problem, counts);
    if (plan.peak_bytes <= budget_bytes && (!best || plan.step_ns < best->step_ns)) best = plan;
    std::size_t of = 0;
    while (of < counts.size() && counts[of] == problem.classes[of].freed.size()) counts[of++] = 0;
    if (of == counts.size()) return best;
    ++counts[of];
  }
}

}  // namespace

TEST_CASE("the fewest of equal blocks that are enough run again, the first ones", "[cost]") {
  const RecomputeProblem problem = make_problem({{8, 100, 10}}, 1000, 240);
  CHECK(evaluate(problem, {0}) == RecomputePlan{.counts = {0}, .peak_bytes = 1800, .step_ns = 240});
  CHECK(find_cheapest_plan(problem, 1800)->counts == std::vector<std::size_t>{0});
  CHECK(find_cheapest_plan(problem, 1500) == RecomputePlan{.counts = {3}, .peak_bytes = 1500, .step_ns = 270});
  CHECK(find_cheapest_plan(problem, 1499)->counts == std::vector<std::size_t>{4});
}

TEST_CASE("a block that runs again needs its own bytes once more, so there is a least peak", "[cost]") {
  const RecomputeProblem problem = make_problem({{8, 100, 10}}, 1000, 240);
  CHECK(find_cheapest_plan(problem, 1100)->counts == std::vector<std::size_t>{7});
  CHECK_FALSE(find_cheapest_plan(problem, 1099));
  CHECK_FALSE(lower_bound_ns(problem, 999));
}

TEST_CASE("blocks that free most for their time run again first", "[cost]") {
  const RecomputeProblem problem = make_problem({{4, 100, 5}, {4, 100, 50}}, 0, 1000);
  CHECK(find_cheapest_plan(problem, 500)->counts == std::vector<std::size_t>{3, 0});
}

TEST_CASE("no plan is faster than the linear relaxation says", "[cost]") {
  const RecomputeProblem problem = make_problem({{8, 100, 10}}, 1000, 240);
  CHECK(lower_bound_ns(problem, 1800) == 240);
  CHECK(lower_bound_ns(problem, 1550) == 270);  // three blocks
  const RecomputeProblem many = make_problem({{70, 100, 10}, {70, 100, 20}}, 1000, 10000);
  CHECK(lower_bound_ns(many, 1000 + 139 * 100 + 50) == 10005);  // half a block
}

TEST_CASE("the front goes from no block to the least peak, and every step costs time", "[cost]") {
  const auto front = list_pareto_front(make_problem({{8, 100, 10}}, 1000, 240));
  REQUIRE(front.size() == 8);
  for (std::size_t i = 1; i < front.size(); ++i) {
    CHECK(front[i].peak_bytes < front[i - 1].peak_bytes);
    CHECK(front[i].step_ns > front[i - 1].step_ns);
  }
}

TEST_CASE("of 4096 plans the one that is found is at most 3 % slower than the best, and the bound holds", "[cost]") {
  std::mt19937 random(38);
  const auto between = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  double worst = 0;
  for (int round = 0; round < 40; ++round) {
    std::vector<TestClass> classes;
    double forward_ns = 0;
    int64_t all_bytes = 0;
    for (int i = 0; i < 3; ++i) {
      classes.push_back({15, between(50, 400), static_cast<double>(between(1000, 20000))});
      forward_ns += 15 * classes.back().block_ns;
      all_bytes += 15 * classes.back().saved_bytes;
    }
    const RecomputeProblem problem = make_problem(classes, 1000, 3 * forward_ns);
    for (const int64_t percent : {80, 55, 30}) {
      const int64_t budget = 1000 + all_bytes * percent / 100;
      const auto best = enumerate(problem, budget), found = find_cheapest_plan(problem, budget);
      REQUIRE(best.has_value() == found.has_value());
      if (!best) continue;
      CHECK(found->peak_bytes <= budget);
      CHECK(*lower_bound_ns(problem, budget) <= best->step_ns * (1 + 1e-9));
      worst = std::max(worst, found->step_ns / best->step_ns - 1);
    }
  }
  INFO("slower by " << worst);
  CHECK(worst < 0.03);
}
