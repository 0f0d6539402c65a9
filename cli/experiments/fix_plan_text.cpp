#include <fmt/format.h>

#include <cmath>

#include "cli/device/device.h"
#include "cli/experiments/fix.h"
#include "cli/experiments/fix_plan.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "profiler/counted.h"
#include "profiler/report/text/table.h"
#include "profiler/report/text/work.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

using PlanJson = nlohmann::ordered_json;

constexpr std::size_t kColumnsOfPlan = 62;
constexpr std::size_t kMaxPlanRows = 14;

std::optional<int64_t> plan_ns(const FixPlan& plan, const FoundPlans& found, const Target& target) {
  return time_of(plan, found.before, target.batch);
}

std::optional<double> samples_per_second(const FixPlan& plan, const FoundPlans& found, const Target& target) {
  const auto ns = plan_ns(plan, found, target);
  if (!found.batch || ns.value_or(0) <= 0) return std::nullopt;
  return static_cast<double>(*found.batch) * 1e9 / static_cast<double>(*ns);
}

std::string rate_of_plan(const FixPlan& plan, const FoundPlans& found, const Target& target) {
  const auto rate = samples_per_second(plan, found, target);
  return rate ? fmt::format("{:.{}f}", *rate, *rate < 100 ? 1 : 0) : "-";
}

std::string_view proof_of(const FixPlan& plan) {
  if (!plan.fix.unproved.empty()) return "not applied";
  if (plan.on_gpu) return plan.is_proved() ? "yes" : "no, runs out";
  return plan.was_run ? "run with more memory" : "not run";
}

std::string row_of_plan(const FixPlan& plan, const FoundPlans& found, const Target& target) {
  return fmt::format("    {} {:>9} {:>9} {:>9} {:>9} {:>10}   {:<8}   {}\n",
                     padded(printable(label_of(plan), kColumnsOfPlan), kColumnsOfPlan),
                     to_gib(plan.predicted_peak_bytes), to_gib(plan.fix.measured_peak_bytes),
                     to_gib(plan.fix.measured_reserved_bytes), milliseconds_text(plan_ns(plan, found, target)),
                     rate_of_plan(plan, found, target), plan.fix.changes_numerics() ? "changed" : "same",
                     proof_of(plan));
}

/// Of a long front the rows of plans that were run, and every so many of the others.
std::vector<std::size_t> choose_rows(const FoundPlans& found) {
  std::size_t not_run = 0, runs = 0;
  for (const FixPlan& plan : found.plans) ++(plan.was_run ? runs : not_run);
  const std::size_t rows_left = kMaxPlanRows > runs ? kMaxPlanRows - runs : 1;
  const std::size_t stride = std::max<std::size_t>(1, (not_run + rows_left - 1) / rows_left);
  std::vector<std::size_t> rows;
  std::size_t seen = 0;
  for (std::size_t i = 0; i < found.plans.size(); ++i) {
    if (found.plans[i].was_run || seen++ % stride == 0) rows.push_back(i);
  }
  return rows;
}

std::string table_of_plans(const FoundPlans& found, const Target& target) {
  std::string text =
      fmt::format("\n  {} {:>9} {:>9} {:>9} {:>9} {:>10}   {:<8}   {}\n", padded("plans, GiB", kColumnsOfPlan + 2),
                  "predicted", "measured", "reserved", "time, ms", "samples/s", "numerics", "proved to fit");
  for (const std::size_t i : choose_rows(found)) text += row_of_plan(found.plans[i], found, target);
  return text;
}

std::string headline_of_plans(const FoundPlans& found, const Target& target) {
  const std::string gpu = describe(target.device);
  if (!found.fastest) return fmt::format("oomdiag: no plan that was found fits on {}\n", gpu);
  return fmt::format("oomdiag: fastest plan that fits on {}: {}\n", gpu, label_of(found.plans[*found.fastest]));
}

std::string describe_plan(const char* name, const FixPlan& plan, const FoundPlans& found, const Target& target) {
  const auto rate = samples_per_second(plan, found, target);
  return fmt::format("  {} {}: {} GiB allocated, {} GiB reserved (measured); {} ms for each step (modelled){}\n",
                     padded(name, 13), label_of(plan), to_gib(plan.peak_bytes()),
                     to_gib(plan.fix.measured_reserved_bytes), milliseconds_text(plan_ns(plan, found, target)),
                     rate ? fmt::format(", {} samples/s", rate_of_plan(plan, found, target)) : "");
}

std::string lines_of_plan(const FixPlan& plan) {
  if (plan.fix.lines.empty()) return {};
  std::string text = fmt::format("\n  {}, as you would write it\n", label_of(plan));
  for (const std::string& line : plan.fix.lines) text += "    " + printable(line, 200) + "\n";
  return text;
}

PlanJson json_of_plan(const FixPlan& plan, const FoundPlans& found, const Target& target) {
  PlanJson ids = PlanJson::array(), recomputed = PlanJson::array(), offloaded = PlanJson::array();
  for (const Change& change : plan.fix.changes) {
    ids.push_back(change.id);
    if (change.offloads_blocks()) {
      offloaded = change.settings["chosen"];
    } else if (change.settings.is_object() && change.settings.contains("blocks")) {
      recomputed = change.settings["blocks"];
    }
  }
  return {{"ids", ids},
          {"label", label_of(plan)},
          {"recomputed_blocks", recomputed},
          {"offloaded_blocks", offloaded},
          {"predicted_peak_bytes", plan.predicted_peak_bytes},
          {"measured_peak_bytes", optional_json(plan.fix.measured_peak_bytes)},
          {"measured_reserved_bytes", optional_json(plan.fix.measured_reserved_bytes)},
          {"predicted_step_time_ns", optional_json(plan.predicted_ns)},
          {"step_time_ns", optional_json(plan_ns(plan, found, target))},
          {"samples_per_second", optional_json(samples_per_second(plan, found, target))},
          {"changes_numerics", plan.fix.changes_numerics()},
          {"was_run", plan.was_run},
          {"fits", plan.on_gpu ? PlanJson(plan.is_proved()) : PlanJson(nullptr)},
          {"how", plan.fix.lines},
          {"unproved", text_or_null(plan.fix.unproved)}};
}

}  // namespace

std::string label_of(const FixPlan& plan) { return plan.fix.changes.empty() ? "as it is" : plan.fix.label(); }

std::string to_text(const FoundPlans& found, const Target& target, const std::string& command) {
  const Before& before = found.before;
  std::string text = headline_of_plans(found, target) + "\n";
  text += fmt::format(
      "  budget        PyTorch may take {} GiB; as it is the program takes {} GiB allocated, {} GiB reserved\n",
      to_gib(before.available_bytes), to_gib(before.allocated_bytes), to_gib(before.reserved_bytes));
  if (found.fastest) text += describe_plan("fastest", found.plans[*found.fastest], found, target);
  if (found.same_sums && found.same_sums != found.fastest) {
    text += describe_plan("same numerics", found.plans[*found.same_sums], found, target);
  }
  if (found.gap) {
    text += fmt::format(
        "  bound         another choice of blocks that takes less than those that ran out can be faster by {:.1f} % at "
        "most\n",
        100 * *found.gap);
  }
  if (!found.no_blocks.empty())
    text += fmt::format("  blocks        no checkpoints were planned: {}\n", found.no_blocks);
  text += table_of_plans(found, target);
  if (found.fastest) text += lines_of_plan(found.plans[*found.fastest]);
  if (found.same_sums && found.same_sums != found.fastest) text += lines_of_plan(found.plans[*found.same_sums]);
  text += fmt::format("\n  {}, {:.0f} s; times are modelled, each for as many samples as a step has now\n",
                      counted(found.runs, "run"), found.seconds);
  if (!command.empty()) text += fmt::format("\n  program: {}\n", printable(command, 200));
  return text;
}

std::string to_json(const FoundPlans& found, const Target& target, const std::string& command) {
  const Before& before = found.before;
  PlanJson json = {{"schema", "oomdiag-plan/1"}, {"command", command}, {"device", describe(target.device)}};
  json["before"] = {{"outcome", before.outcome},
                    {"peak_allocated_bytes", before.allocated_bytes},
                    {"peak_reserved_bytes", before.reserved_bytes},
                    {"available_bytes", before.available_bytes},
                    {"step_time_ns", optional_json(before.step.time_ns)}};
  json["fastest"] = optional_json(found.fastest);
  json["fastest_with_same_numerics"] = optional_json(found.same_sums);
  json["gap"] = optional_json(found.gap);
  json["batch"] = optional_json(found.batch);
  json["plans"] = PlanJson::array();
  for (const FixPlan& plan : found.plans) json["plans"].push_back(json_of_plan(plan, found, target));
  json["interrupted"] = found.interrupted_by != 0;
  json["runs"] = found.runs;
  json["seconds"] = found.seconds;
  return oomdiag::to_text(json);
}

}  // namespace oomdiag
