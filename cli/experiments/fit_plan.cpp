#include "cli/experiments/fit_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "cli/experiments/border_search.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/run_ranks.h"
#include "cli/launch/diagnosis.h"
#include "cli/launch/ranks.h"
#include "cli/launch/steady.h"
#include "cli/process/environment.h"
#include "cli/process/temporary_folder.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "profiler/error.h"
#include "profiler/report/report.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kMaxPlans = 256;
constexpr int kRunsOfSearch = 6;  // in one plan: each is of several ranks

/// "world=64,tp=2": the name of a plan's report.
std::string name_of(const Values& values) {
  std::string text;
  for (const auto& [name, value] : values) text += fmt::format("{}{}={}", text.empty() ? "" : ",", name, value);
  return text;
}

/// The other way round; empty if it is no such name.
Values values_of(const std::string& name) {
  Values values;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    if (equals == part.npos) return {};
    const std::optional<int64_t> value = parse_whole_number(std::string_view(part).substr(equals + 1));
    if (!value) return {};
    values[part.substr(0, equals)] = *value;
  }
  return values;
}

Plan run_plan(const Values& values, const FitRequest& request, const RankOptions& host, const Install& install) {
  const TemporaryFolder folder;
  RankOptions ranks = host;
  ranks.world_size = static_cast<int>(values.at(kWorld));
  ranks.ranks = "distinct";
  const Job job = choose_job(ranks, 1);
  const DiagnosisRequest diagnosis{.program = fill_in(request.program, values),
                                   .device = {.device = host_of(job, request.device)},
                                   .base = folder.path(),
                                   .is_metered = true,
                                   .steady = SteadyRule{.steps = request.steps, .to_end = request.to_end}};
  RanksDiagnosis found = run_ranks(job, diagnosis, install, [](std::size_t) {});
  explain_ranks(found);
  Plan plan{.values = values};
  if (found.report) plan = read_plan(values, *found.report);
  const auto why = std::find_if(found.why_failed.begin(), found.why_failed.end(),
                                [](const std::string& one) { return !one.empty(); });
  if (plan.outcome != "out_of_memory" && why != found.why_failed.end()) {
    plan.outcome = "failed";
    plan.why = *why;
  }
  return plan;
}

Plan search_plan(const Values& others, const Variable& variable, const FitRequest& request, const RankOptions& host,
                 const Install& install) {
  BorderSearch search(
      variable.count(), [&](int64_t i) { return variable.value(i); }, std::min(request.most_runs, kRunsOfSearch));
  std::map<int64_t, Plan> plans;
  std::optional<Plan> failed;
  run_search(search, 1, [&](const std::vector<int64_t>& positions) -> std::optional<std::vector<Point>> {
    Values values = others;
    values[variable.name] = variable.value(positions.front());
    const Plan& plan = plans[positions.front()] = run_plan(values, request, host, install);
    if (!plan.fits() && plan.outcome != "out_of_memory") {
      failed = plan;
      return std::nullopt;
    }
    return std::vector<Point>{{.passes = plan.fits(),
                               .allocated_bytes = plan.allocated_bytes,
                               .needed_bytes = plan.needed_bytes,
                               .available_bytes = plan.available_bytes}};
  });
  return failed ? *failed : plans.at(search.found().value_or(0));
}

/// A batch can be searched; how a model is split is tried.
bool is_searched(const Variable& variable) {
  return variable.name != kWorld && variable.list.empty() && variable.step > 0;
}

}  // namespace

std::optional<double> Plan::flops_per_second() const {
  if (!step_ns || *step_ns <= 0) return std::nullopt;
  return 1e9 * static_cast<double>(flops) / static_cast<double>(*step_ns);
}

bool is_plan(const std::vector<Variable>& variables) {
  return std::any_of(variables.begin(), variables.end(), [](const Variable& one) { return one.name == kWorld; });
}

Planning list_plans(std::vector<Variable> variables) {
  Planning planning;
  if (is_searched(variables.front())) {
    planning.searched = variables.front();
    variables.erase(variables.begin());
  }
  int64_t plans = 1;
  for (Variable& variable : variables) {
    if (variable.name == kWorld && variable.step == 1) variable.step = 0;
    if (variable.count() > kMaxPlans / plans) {
      throw Error(ErrorKind::usage, fmt::format("more than {} plans are too many: all of them are tried", kMaxPlans),
                  "as in: --vary world=8..1024:pow2 --vary tp=1,2,4,8");
    }
    plans *= variable.count();
  }
  planning.plans = combine(variables);
  return planning;
}

Plan read_plan(const Values& values, const Report& report) {
  Plan plan{.values = values, .outcome = report.outcome, .worst_rank = report.rank};
  if (const ReportOfDevice* const device = main_device_of(report)) {
    plan.allocated_bytes = device->peak.allocated_bytes;
    plan.reserved_bytes = device->peak.reserved_bytes;
    plan.available_bytes = available_bytes(*device);
    plan.needed_bytes = needed_bytes(*device);
    plan.place = place_of_failure(*device);
  }
  if (report.work) {
    plan.step_ns = report.work->step_time_ns;
    plan.flops = report.work->flops;
  }
  for (const ReportRank& rank : report.ranks) {
    if (plan.outcome == "out_of_memory" || rank.peak.allocated_bytes <= plan.allocated_bytes) continue;
    plan.allocated_bytes = rank.peak.allocated_bytes;
    plan.reserved_bytes = plan.needed_bytes = rank.peak.reserved_bytes;
    plan.worst_rank = rank.rank.value_or(plan.worst_rank);
  }
  return plan;
}

void run_plans(const Planning& planning, const FitRequest& request, const RankOptions& host, const Install& install,
               const std::function<void(Plan)>& take) {
  for (const Values& values : planning.plans) {
    take(planning.searched ? search_plan(values, *planning.searched, request, host, install)
                           : run_plan(values, request, host, install));
  }
}

std::string print_jobs(const std::vector<Values>& plans, const FitRequest& request,
                       const std::vector<std::string>& options, const std::string& folder) {
  std::string text;
  for (const Values& values : plans) {
    std::vector<std::string> words{"oomdiag", "run"};
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(),
                 {"--world-size", std::to_string(values.at(kWorld)), "--ranks", "distinct", "--meter", "--no-progress",
                  "--folder", folder, "-o", (fs::path(folder) / (name_of(values) + ".json")).string(), "--"});
    const std::vector<std::string> program = fill_in(request.program, values);
    words.insert(words.end(), program.begin(), program.end());
    text += fmt::format("mkdir -p {} && {}", quoted_for_shell(folder), line_for_shell(words));
    text += "\n";
  }
  return text;
}

std::vector<Plan> collect_plans(const fs::path& folder) {
  std::vector<Plan> plans;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const Values values = values_of(entry.path().stem().string());
    if (entry.path().extension() != ".json" || values.count(kWorld) == 0) continue;
    plans.push_back(read_plan(values, load_report(entry.path())));
  }
  if (plans.empty()) {
    throw Error(ErrorKind::input, fmt::format("'{}' holds no report of a plan", folder.string()),
                "run what fit --print-jobs prints, which writes them as world=64,tp=2.json");
  }
  std::sort(plans.begin(), plans.end(), [](const Plan& a, const Plan& b) { return a.values < b.values; });
  return plans;
}

}  // namespace oomdiag
