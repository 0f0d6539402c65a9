#include <algorithm>
#include <cmath>
#include <tuple>

#include "cli/device/device.h"
#include "cli/experiments/fix.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/report/report.h"

// Which changes to try together: peaks are taken to fall by the product of the shares that were measured. The true peak can
// lie on either side of that, so what misses by a tenth is tried too; what counts is the run.

namespace oomdiag {
namespace {

constexpr double kNoSaving = 0.995;
constexpr double kMayMiss = 1.1;

struct Choice {
  std::vector<Change> changes;
  int cost = 0;
  double peak = 0;
  std::size_t next = 0;  ///< of the measured ones, the first that may join
};

bool clashes(const Choice& choice, const Change& with) {
  return std::any_of(choice.changes.begin(), choice.changes.end(),
                     [&](const Change& change) { return change.group == with.group; });
}

std::vector<Choice> extend(const std::vector<Choice>& choices, const std::vector<MeasuredFix>& measured, double whole) {
  std::vector<Choice> longer;
  for (const Choice& choice : choices) {
    for (std::size_t i = choice.next; i < measured.size(); ++i) {
      const MeasuredFix& one = measured[i];
      if (!one.measured_peak_bytes || one.changes.size() != 1 || clashes(choice, one.changes.front())) continue;
      const double share = static_cast<double>(*one.measured_peak_bytes) / whole;
      if (share > kNoSaving) continue;
      longer.push_back({choice.changes, choice.cost + one.cost(), choice.peak * share, i + 1});
      longer.back().changes.push_back(one.changes.front());
    }
  }
  return longer;
}

}  // namespace

std::vector<std::vector<Change>> combine(const std::vector<MeasuredFix>& measured, const Before& before) {
  const auto whole = static_cast<double>(before.allocated_bytes),
             available = static_cast<double>(before.available_bytes);
  const std::vector<Choice> singles = extend({{.changes = {}, .cost = 0, .peak = whole, .next = 0}}, measured, whole);
  std::vector<Choice> choices;
  for (const Choice& one : singles) {  // the bytes would fit, but not with fragmentation
    if (one.peak > available) continue;
    choices.push_back(one);
    choices.back().changes.push_back(expandable_segments());
  }
  const std::vector<Choice> pairs = extend(singles, measured, whole), triples = extend(pairs, measured, whole);
  choices.insert(choices.end(), pairs.begin(), pairs.end());
  choices.insert(choices.end(), triples.begin(), triples.end());
  std::erase_if(choices, [&](const Choice& one) { return one.peak > kMayMiss * available; });
  std::stable_sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) { return a.cost < b.cost; });
  std::vector<std::vector<Change>> result;
  for (Choice& one : choices) result.push_back(std::move(one.changes));
  return result;
}

StepCost cost_of_step(const Report& report) {
  if (!report.work || report.work->step == 0) return {};
  return {.flops = report.work->flops, .bus_bytes = report.work->bus_bytes, .time_ns = report.work->step_time_ns};
}

// Micro-batches of a loop without PyTorch's optimizers count as steps: then its products are a share of what they were.
double MeasuredFix::steps_for_one(const StepCost& before, std::optional<int64_t> batch) const {
  double steps = 1;
  for (const Change& change : changes) {
    if (change.batch && batch && *change.batch > 0) {
      steps *= static_cast<double>(*batch) / static_cast<double>(*change.batch);
    } else if (change.changes_batch() && before.flops && step.flops.value_or(0) > 0) {
      steps *= std::max(1.0, std::round(static_cast<double>(*before.flops) / static_cast<double>(*step.flops)));
    }
  }
  return steps;
}

std::optional<double> MeasuredFix::slowdown(const StepCost& before, std::optional<int64_t> batch) const {
  if (!step.time_ns || before.time_ns.value_or(0) == 0) return std::nullopt;
  return steps_for_one(before, batch) * static_cast<double>(*step.time_ns) / static_cast<double>(*before.time_ns);
}

std::string MeasuredFix::label() const {
  std::string text;
  for (const Change& change : changes) text += (text.empty() ? "" : " + ") + change.label;
  return text;
}

int MeasuredFix::cost() const {
  int sum = 0;
  for (const Change& change : changes)
    sum += static_cast<int>(change.cost) * 10 + 1 + static_cast<int>(change.extra_forward * 9);
  return sum;
}

bool MeasuredFix::changes_numerics() const {
  return std::any_of(changes.begin(), changes.end(), [](const Change& change) { return change.changes_numerics; });
}

double MeasuredFix::extra_forward() const {
  double sum = 0;
  for (const Change& change : changes) sum += change.extra_forward;
  return sum;
}

std::optional<int64_t> MeasuredFix::recomputed_ops() const {
  int64_t sum = 0;
  for (const Change& change : changes) {
    if (change.extra_forward == 0) continue;
    if (!change.recomputed_ops) return std::nullopt;
    sum += *change.recomputed_ops;
  }
  return sum;
}

std::optional<int64_t> MeasuredFix::predicted_peak_bytes() const {
  return changes.size() == 1 ? changes.front().predicted_peak_bytes : std::nullopt;
}

bool MeasuredFix::predicted_at_least() const { return changes.size() == 1 && changes.front().predicted_at_least; }

bool MeasuredFix::cures(const Before& before) const {
  if (changes.size() != 1) return false;
  return changes.front().cures || (before.reason && is_run_as(before.reason->fix, changes.front().id));
}

void sort_fixes(std::vector<MeasuredFix>& fixes, const Before& before, std::optional<int64_t> batch) {
  const auto rank = [&](const MeasuredFix& fix) {
    const std::optional<double> slowdown = fix.helps() ? fix.slowdown(before.step, batch) : std::nullopt;
    const int64_t peak = fix.helps() ? 0 : fix.measured_peak_bytes.value_or(kMaxGpuBytes);
    return std::tuple(!fix.helps(), !(fix.helps() && fix.cures(before)), fix.helps() && !slowdown, slowdown.value_or(0),
                      fix.helps() ? fix.cost() : 0, peak);
  };
  std::ranges::stable_sort(fixes, {}, rank);
}

bool Fixed::helped() const {
  return before.outcome == "ok" ||
         std::any_of(fixes.begin(), fixes.end(), [](const MeasuredFix& one) { return one.helps(); });
}

}  // namespace oomdiag
