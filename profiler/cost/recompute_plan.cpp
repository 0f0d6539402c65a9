#include "profiler/cost/recompute_plan.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace oomdiag {
namespace {

/// A plan with what is in use at each position.
class OpenPlan {
 public:
  explicit OpenPlan(const RecomputeProblem& problem)
      : problem_(&problem),
        bytes_(problem.bytes),
        plan_{.counts = std::vector<std::size_t>(problem.classes.size()), .step_ns = problem.step_ns} {
    find_highest();
  }

  bool can_add(std::size_t of) const { return plan_.counts[of] < problem_->classes[of].freed.size(); }
  bool can_remove(std::size_t of) const { return plan_.counts[of] > 0; }
  void add(std::size_t of) { change(of, plan_.counts[of]++, -1); }
  void remove(std::size_t of) { change(of, --plan_.counts[of], 1); }

  /// Of the bytes above the budget at the highest position, those that one block more frees for each nanosecond.
  double worth(std::size_t of, int64_t budget_bytes) const {
    const BlockClass& one = problem_->classes[of];
    const int64_t freed = std::min(one.freed[plan_.counts[of]][highest_], plan_.peak_bytes - budget_bytes);
    return static_cast<double>(freed) / std::max(one.block_ns, 1.0);
  }
  std::size_t size() const { return plan_.counts.size(); }
  const RecomputePlan& plan() const { return plan_; }

 private:
  void change(std::size_t of, std::size_t block, int sign) {
    const BlockClass& one = problem_->classes[of];
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] += sign * one.freed[block][i];
    plan_.step_ns -= sign * one.block_ns;
    find_highest();
  }

  void find_highest() {
    const auto highest = std::ranges::max_element(bytes_);
    highest_ = static_cast<std::size_t>(highest - bytes_.begin());
    plan_.peak_bytes = highest == bytes_.end() ? 0 : *highest;
  }

  const RecomputeProblem* problem_;
  std::vector<int64_t> bytes_;
  std::size_t highest_ = 0;
  RecomputePlan plan_;
};

/// The class whose next block is worth most; nullopt where none frees anything.
std::optional<std::size_t> most_worth(const OpenPlan& open, int64_t budget_bytes) {
  std::optional<std::size_t> best;
  double most = 0;
  for (std::size_t of = 0; of < open.size(); ++of) {
    if (!open.can_add(of)) continue;
    const double worth = open.worth(of, budget_bytes);
    if (worth > most) most = worth, best = of;
  }
  return best;
}

bool get_below(OpenPlan& open, int64_t budget_bytes) {
  while (open.plan().peak_bytes > budget_bytes) {
    const auto next = most_worth(open, budget_bytes);
    if (!next) return false;
    open.add(*next);
  }
  return true;
}

/// Takes away what is not needed, the most expensive first.
void drop_needless(OpenPlan& open, const RecomputeProblem& problem, int64_t budget_bytes) {
  std::vector<std::size_t> order(open.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, std::greater<>{}, [&](std::size_t of) { return problem.classes[of].block_ns; });
  for (const std::size_t of : order) {
    while (open.can_remove(of)) {
      open.remove(of);
      if (open.plan().peak_bytes <= budget_bytes) continue;
      open.add(of);
      break;
    }
  }
}

/// One block more or less of a class, and what follows from that.
std::optional<OpenPlan> exchange(OpenPlan open, const RecomputeProblem& problem, int64_t budget_bytes, std::size_t of,
                                 bool more) {
  if (more ? !open.can_add(of) : !open.can_remove(of)) return std::nullopt;
  more ? open.add(of) : open.remove(of);
  if (!get_below(open, budget_bytes)) return std::nullopt;
  drop_needless(open, problem, budget_bytes);
  return open;
}

bool improve(OpenPlan& best, const RecomputeProblem& problem, int64_t budget_bytes) {
  for (std::size_t of = 0; of < best.size(); ++of) {
    for (const bool more : {true, false}) {
      auto other = exchange(best, problem, budget_bytes, of, more);
      if (!other || other->plan().step_ns >= best.plan().step_ns) continue;
      best = std::move(*other);
      return true;
    }
  }
  return false;
}

/// The least time in which fractions of blocks free `needed` bytes at a position.
std::optional<double> relaxed_ns(const RecomputeProblem& problem, std::size_t position, int64_t needed) {
  std::vector<std::pair<double, double>> items;  // nanoseconds per byte, bytes
  for (const BlockClass& one : problem.classes) {
    for (const std::vector<int64_t>& freed : one.freed) {
      const auto bytes = static_cast<double>(freed[position]);
      if (bytes > 0) items.emplace_back(one.block_ns / bytes, bytes);
    }
  }
  std::ranges::sort(items);
  auto left = static_cast<double>(needed);
  double ns = 0;
  for (const auto& [price, bytes] : items) {
    const double taken = std::min(left, bytes);
    ns += taken * price;
    left -= taken;
    if (left <= 0) return ns;
  }
  return std::nullopt;
}

constexpr std::size_t kMaxEnumerated = 4096;

std::size_t count_plans(const RecomputeProblem& problem) {
  std::size_t plans = 1;
  for (const BlockClass& one : problem.classes) plans = std::min(plans * (one.freed.size() + 1), kMaxEnumerated + 1);
  return plans;
}

/// The same with blocks of which any so many free no more than the first so many do here, and nothing is recomputed.
RecomputeProblem make_optimistic(RecomputeProblem problem) {
  for (BlockClass& one : problem.classes) {
    std::vector<int64_t> at_position(one.freed.size());
    for (std::size_t i = 0; i < problem.bytes.size(); ++i) {
      for (std::size_t k = 0; k < at_position.size(); ++k) at_position[k] = std::max<int64_t>(0, one.freed[k][i]);
      std::ranges::sort(at_position, std::greater<>{});
      for (std::size_t k = 0; k < at_position.size(); ++k) one.freed[k][i] = at_position[k];
    }
  }
  return problem;
}

/// Lowers `least` to the least time of all plans that have the counts of `open` for the classes before `of`.
void enumerate_plans(OpenPlan open, std::size_t of, int64_t budget_bytes, std::optional<double>& least) {
  if (least && open.plan().step_ns >= *least) return;
  if (of == open.size()) {
    if (open.plan().peak_bytes <= budget_bytes) least = open.plan().step_ns;
    return;
  }
  enumerate_plans(open, of + 1, budget_bytes, least);
  while (open.can_add(of)) {
    open.add(of);
    enumerate_plans(open, of + 1, budget_bytes, least);
  }
}

}  // namespace

std::optional<RecomputePlan> find_cheapest_plan(const RecomputeProblem& problem, int64_t budget_bytes) {
  OpenPlan best(problem);
  if (!get_below(best, budget_bytes)) return std::nullopt;
  drop_needless(best, problem, budget_bytes);
  while (improve(best, problem, budget_bytes)) {
  }
  return best.plan();
}

std::optional<double> lower_bound_ns(const RecomputeProblem& problem, int64_t budget_bytes) {
  double most = 0;
  for (std::size_t i = 0; i < problem.bytes.size(); ++i) {
    if (problem.bytes[i] <= budget_bytes) continue;
    const auto ns = relaxed_ns(problem, i, problem.bytes[i] - budget_bytes);
    if (!ns) return std::nullopt;
    most = std::max(most, *ns);
  }
  std::optional<double> of_whole_blocks;
  if (count_plans(problem) <= kMaxEnumerated) {
    enumerate_plans(OpenPlan(make_optimistic(problem)), 0, budget_bytes, of_whole_blocks);
  }
  return std::max(problem.step_ns + most, of_whole_blocks.value_or(0));
}

std::vector<RecomputePlan> list_pareto_front(const RecomputeProblem& problem) {
  OpenPlan open(problem);
  std::vector<RecomputePlan> front{open.plan()};
  while (auto plan = find_cheapest_plan(problem, front.back().peak_bytes - 1)) {
    if (plan->peak_bytes >= front.back().peak_bytes) break;
    front.push_back(std::move(*plan));
  }
  return front;
}

}  // namespace oomdiag
