#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <tuple>

#include "cli/experiments/fit.h"
#include "cli/experiments/fit_plan.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "profiler/counted.h"
#include "profiler/report/text/work.h"

namespace oomdiag {
namespace {

std::string text_of(const Values& values) {
  std::string text = fmt::format("{} = {}", kWorld, values.at(kWorld));
  for (const auto& [name, value] : values) {
    if (name != kWorld) text += fmt::format(", {} = {}", name, value);
  }
  return text;
}

std::string outcome_of(const Plan& plan) {
  if (plan.fits()) return "fits";
  if (plan.outcome == "out_of_memory") return "out of memory in " + plan.place;
  return plan.why.empty() ? plan.outcome : "failed: " + plan.why;
}

std::string step_text(const Plan& plan) { return plan.step_ns ? milliseconds_text(plan.step_ns) : ""; }

std::string speed_text(const Plan& plan) {
  const auto speed = plan.flops_per_second();
  return speed ? fmt::format("{:.1f}", *speed * 1e-12) : "";
}

}  // namespace

const Plan* best_plan(const std::vector<Plan>& plans, const std::string& searched) {
  const Plan* best = nullptr;
  const auto cost = [&](const Plan& plan) {
    const int64_t value = searched.empty() ? 0 : plan.values.at(searched);
    return std::tuple(-value, plan.values.at(kWorld), plan.allocated_bytes);
  };
  for (const Plan& plan : plans) {
    if (plan.fits() && (best == nullptr || cost(plan) < cost(*best))) best = &plan;
  }
  return best;
}

const Plan* fastest_plan(const std::vector<Plan>& plans) {
  const Plan* fastest = nullptr;
  for (const Plan& plan : plans) {
    const auto speed = plan.flops_per_second();
    if (plan.fits() && speed && (fastest == nullptr || *speed > *fastest->flops_per_second())) fastest = &plan;
  }
  return fastest;
}

std::string plans_text(const std::vector<Plan>& plans, const std::string& searched) {
  const Plan* best = best_plan(plans, searched);
  const std::string what = searched.empty() ? "smallest world" : "largest " + searched;
  std::string text = best == nullptr ? "oomdiag: no plan fits\n\n"
                                     : fmt::format("oomdiag: the {} that fits: {}\n\n", what, text_of(best->values));
  if (const Plan* const fastest = fastest_plan(plans)) {
    text.pop_back();
    text += fmt::format("  most work of a GPU per second: {}, {} TFLOP/s (modelled)\n\n", text_of(fastest->values),
                        speed_text(*fastest));
  }
  std::string head;
  for (const auto& [name, value] : plans.front().values) head += fmt::format("{:>8}", name);
  text += fmt::format("  {}   worst rank    peak, GiB   reserved   step, ms   TFLOP/s\n", head);
  for (const Plan& plan : plans) {
    std::string row;
    for (const auto& [name, value] : plan.values) row += fmt::format("{:>8}", value);
    const bool has_peak = plan.allocated_bytes > 0;
    text +=
        fmt::format("  {}   {:>10}   {:>10}   {:>8}   {:>8}   {:>7}   {}\n", row,
                    has_peak ? std::to_string(plan.worst_rank) : "", has_peak ? to_gib(plan.allocated_bytes) : "",
                    has_peak ? to_gib(plan.reserved_bytes) : "", step_text(plan), speed_text(plan), outcome_of(plan));
  }
  const std::string of_each = searched.empty() ? "" : fmt::format(" with the largest {} that was found", searched);
  return text + fmt::format("\n  {}{}, of each one rank of every kind; peaks measured, times modelled\n",
                            counted(plans.size(), "plan"), of_each);
}

std::string plans_json(const std::vector<Plan>& plans, const std::string& searched) {
  using Json = nlohmann::ordered_json;
  Json json = {{"schema", "oomdiag-fit/1"}};
  const Plan* best = best_plan(plans);
  json["smallest_world"] = best == nullptr ? Json(nullptr) : Json(best->values);
  if (!searched.empty()) {
    const Plan* largest = best_plan(plans, searched);
    json["largest"] = largest == nullptr ? Json(nullptr) : Json(largest->values);
  }
  json["plans"] = Json::array();
  for (const Plan& plan : plans) {
    Json one = Json(plan.values);
    one["outcome"] = plan.outcome;
    one["worst_rank"] = plan.worst_rank;
    one["peak_allocated_bytes"] = plan.allocated_bytes;
    one["peak_reserved_bytes"] = plan.reserved_bytes;
    one["step_time_ns"] = optional_json(plan.step_ns);
    one["flops"] = plan.flops;
    if (!plan.why.empty()) one["why"] = plan.why;
    json["plans"].push_back(std::move(one));
  }
  return to_text(json) + "\n";
}

}  // namespace oomdiag
