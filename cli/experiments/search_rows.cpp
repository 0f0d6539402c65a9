#include "cli/experiments/search_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_plan.h"
#include "cli/experiments/fit_values.h"
#include "cli/experiments/fix.h"
#include "cli/experiments/fix_plan.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/export/plan_picture.h"
#include "profiler/export/search_page.h"
#include "profiler/export/surface_picture.h"
#include "profiler/report/text/work.h"

namespace oomdiag {
namespace {

void append_note(std::string& text, const std::string& part) {
  if (!part.empty()) text += (text.empty() ? "" : "; ") + part;
}

SearchRow row_of(const FitRun& run, const std::string& gpu) {
  const Experiment& experiment = run.experiment;
  SearchRow row{.label = gpu, .note = experiment.passed() ? "" : experiment.why};
  if (fits(run) != Fits::unknown) row.fits = fits(run) == Fits::yes;
  const std::string memory = run.memory_bytes > 0 ? with_unit(run.memory_bytes) + " of GPU" : "";
  append_note(row.label, run.learns ? "more memory than any GPU" : memory);
  append_note(row.label, describe(run.values));
  if (experiment.ran_out()) row.note = "out of memory in " + experiment.place;
  if (experiment.allocated_bytes > 0) row.measured_bytes = experiment.allocated_bytes;
  if (experiment.reserved_bytes > 0) row.reserved_bytes = experiment.reserved_bytes;
  const int64_t gpu_bytes = run.learns ? run.gpu_bytes : experiment.total_bytes;
  row.available_bytes = std::max<int64_t>(experiment.available_bytes(gpu_bytes), 0);
  return row;
}

SearchRow row_of(const Plan& plan) {
  SearchRow row{.label = describe(plan.values), .available_bytes = plan.available_bytes, .fits = plan.fits()};
  if (plan.allocated_bytes > 0) {
    row.measured_bytes = plan.allocated_bytes;
    row.reserved_bytes = plan.reserved_bytes;
    row.note = fmt::format("worst is rank {}", plan.worst_rank);
  }
  append_note(row.note, plan.outcome == "out_of_memory" ? "out of memory in " + plan.place : plan.why);
  return row;
}

SearchRow row_of(const MeasuredFix& fix, int64_t available_bytes) {
  SearchRow row{.label = fix.label(),
                .measured_bytes = fix.measured_peak_bytes,
                .reserved_bytes = fix.measured_reserved_bytes,
                .predicted_bytes = fix.predicted_peak_bytes(),
                .available_bytes = available_bytes,
                .note = fix.unproved,
                .lines = fix.lines};
  if (fix.unproved.empty()) row.fits = fix.helps();
  append_note(row.note, fix.still_grows ? "grows from step to step all the same" : "");
  if (fix.extra_forward() > 0) append_note(row.note, fmt::format("forward +{:.0f} %", 100 * fix.extra_forward()));
  append_note(row.note, fix.changes_numerics() ? "numerics change" : "");
  return row;
}

}  // namespace

std::vector<SearchRow> rows_of(const std::vector<FitOfGpu>& gpus) {
  std::vector<SearchRow> rows;
  for (const FitOfGpu& gpu : gpus) {
    std::vector<FitRun> runs = gpu.runs;
    std::ranges::stable_sort(runs, {}, [](const FitRun& run) { return std::tuple(run.values, run.memory_bytes); });
    for (const FitRun& run : runs) rows.push_back(row_of(run, gpus.size() > 1 ? gpu.gpu : ""));
  }
  return rows;
}

std::vector<SearchRow> rows_of(const std::vector<Plan>& plans) {
  std::vector<SearchRow> rows;
  for (const Plan& plan : plans) rows.push_back(row_of(plan));
  return rows;
}

std::vector<SearchRow> rows_of(const Fixed& fixed) {
  const Before& before = fixed.before;
  std::vector<SearchRow> rows{{.label = "as it is",
                               .measured_bytes = before.allocated_bytes,
                               .reserved_bytes = before.reserved_bytes,
                               .available_bytes = before.available_bytes,
                               .fits = before.outcome == "ok",
                               .note = before.outcome == "ok" ? "" : "out of memory in " + before.place}};
  if (before.outcome != "ok" && !before.is_whole)
    append_note(rows.front().note, "at least: no whole run could be seen");
  for (const MeasuredFix& fix : fixed.fixes) rows.push_back(row_of(fix, before.available_bytes));
  return rows;
}

std::vector<SearchRow> rows_of(const FoundPlans& found, const Target& target) {
  std::vector<SearchRow> rows;
  for (const FixPlan& plan : found.plans) {
    rows.push_back({.label = label_of(plan),
                    .measured_bytes = plan.fix.measured_peak_bytes,
                    .reserved_bytes = plan.fix.measured_reserved_bytes,
                    .predicted_bytes = plan.predicted_peak_bytes,
                    .available_bytes = found.before.available_bytes,
                    .note = plan.fix.unproved,
                    .lines = plan.fix.lines});
    if (plan.on_gpu) rows.back().fits = plan.is_proved();
    append_note(rows.back().note, milliseconds_text(time_of(plan, found.before, target.batch)) + " ms");
    append_note(rows.back().note, plan.fix.changes_numerics() ? "numerics change" : "");
  }
  return rows;
}

SearchPicture picture_of(const FoundPlans& found, const Target& target) {
  std::vector<PlanPoint> points;
  for (const FixPlan& plan : found.plans) {
    const auto ns = time_of(plan, found.before, target.batch);
    if (!ns) continue;
    points.push_back({.label = label_of(plan), .peak_bytes = plan.peak_bytes(), .step_ns = *ns});
    if (plan.on_gpu) points.back().state = plan.is_proved() ? PlanPoint::State::fits : PlanPoint::State::does_not_fit;
  }
  return {.heading = "Peak against time",
          .note =
              "Green: run, fits; red: run, does not; hollow: computed, or run with more memory. The line is what "
              "PyTorch may "
              "take of the GPU. Times are modelled.",
          .svg = draw_plans(points, found.before.available_bytes)};
}

SearchPicture picture_of(const FitOfGpu& found) {
  if (!found.surface) return {};
  return {
      .heading = fmt::format("Peak by {} and {}", found.surface->x_name, found.surface->y_name),
      .note =
          "Computed from the runs below. The line is the border of the GPU; ~: an estimate, as the report says of it.",
      .svg = draw_surface(*found.surface)};
}

}  // namespace oomdiag
