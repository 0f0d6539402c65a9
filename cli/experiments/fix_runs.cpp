#include "cli/experiments/fix_runs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/experiments/complete.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fix.h"
#include "cli/process/workers.h"
#include "cli/terminal/sizes.h"
#include "profiler/error.h"
#include "profiler/explain/causes/causes.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/framework_lines.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/report/make/whole_run.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

bool grows(const Report& report) {
  return std::any_of(report.devices.begin(), report.devices.end(),
                     [](const ReportOfDevice& device) { return !device.growth.empty(); });
}

/// What only a change to the code cures: the reason with its lines, else what keeps from step to step.
std::vector<std::string> list_code_changes(const ReportOfDevice& device) {
  if (device.reason) {
    std::vector<std::string> changes{device.reason->text};
    changes.insert(changes.end(), device.reason->how.begin(), device.reason->how.end());
    return changes;
  }
  std::vector<std::string> changes;
  for (const ReportGrowth& growth : device.growth) {
    const std::string place = !growth.source.empty()   ? growth.source
                              : !growth.module.empty() ? growth.module
                                                       : growth.op;
    changes.push_back(
        fmt::format("{} keeps {} GiB from step to step: keep a number in place of a tensor (.item(), .detach())", place,
                    to_gib(growth.bytes_per_step)));
  }
  return changes;
}

}  // namespace

ExperimentRequest FixRuns::request(const std::vector<Change>& changes, Place place) const {
  ExperimentRequest request{.program = target_.program,
                            .device = {.device = target_.device},
                            .environment = target_.environment,
                            .rank = target_.rank};
  request.is_metered = true;
  request.batch = target_.batch;
  request.fixes = nlohmann::json::array();
  for (const Change& change : changes) {
    request.environment.insert(request.environment.end(), change.environment.begin(), change.environment.end());
    request.program.insert(request.program.end(), change.added.begin(), change.added.end());
    if (change.batch) request.batch = change.batch;
    if (!change.settings.is_null()) {
      request.fixes.push_back({find_fix(change.id)->id, change.settings});
    }
  }
  request.fixes.push_back({"look", nlohmann::json::object()});
  if (request.batch) request.program = fill_in(std::move(request.program), {{"batch", *request.batch}});
  if (place == Place::gpu && target_.proves_on_real) request.device = {};
  if (place == Place::with_ample_memory) {
    request.judged_bytes = target_.device.bytes_of_device();
    request.device = {.device = with_ample_memory(target_.device)};
    request.steady.most = kMaxSteps;
  }
  return request;
}

void FixRuns::make(const std::vector<ExperimentRequest>& requests,
                   const std::function<void(std::size_t, const Experiment&)>& take) {
  std::vector<Experiment> experiments;
  try {
    experiments =
        experiments_.run(requests, [&](std::size_t over) { on_done_(over, experiments_.count() + requests.size()); });
  } catch (const Interrupted&) {
    const auto& finished = experiments_.finished();
    for (std::size_t i = 0; i < finished.size(); ++i) {
      if (finished[i]) take(i, *finished[i]);
    }
    throw;
  }
  for (std::size_t i = 0; i < experiments.size(); ++i) take(i, experiments[i]);
}

// A program that grows from step to step has no steady need: it is run as far as it came before, and a little further.
void FixRuns::profile_the_complete_run(bool keeps_step) {
  std::vector<ExperimentRequest> requests{request({}, Place::gpu), request({}, Place::with_ample_memory)};
  requests.back().keeps_step = keeps_step;
  std::vector<Experiment> experiments(requests.size());
  make(requests, [&](std::size_t i, const Experiment& experiment) { experiments[i] = experiment; });
  const Experiment &first = experiments[0], &whole = experiments[1];
  if (!first.passed() && !first.ran_out()) {
    throw Error(ErrorKind::environment, fmt::format("the program fails, and not for want of memory: {}", first.why),
                "all that it says is shown by: oomdiag run -- PROGRAM");
  }
  before_.outcome = first.outcome;
  before_.place = first.place;
  const bool was_cut_short = whole.stopped_at_step > 0 && whole.passed() && grows(*whole.report);
  before_.is_whole = whole.passed() && !was_cut_short && !is_share_of_gpu(whole.allocated_bytes, whole.total_bytes);
  const Experiment& seen = before_.is_whole ? whole : first;
  before_.allocated_bytes = seen.allocated_bytes;
  before_.reserved_bytes = seen.reserved_bytes;
  before_.available_bytes = first.available_bytes(first.total_bytes);
  before_.step = cost_of_step(*seen.report);
  before_.required_bytes = seen.allocated_bytes + first.non_pytorch_bytes;
  profile_ = read_profile(whole.reported);
  whole_ = seen;
  weigh_blocks(profile_, *whole_.report);
  if (!first.ran_out()) return;
  const ReportOfDevice& device = first.report->devices[first.report->main_device];
  if (device.cause) before_.cause = name_of(device.cause->kind);
  before_.grows = !device.growth.empty();
  before_.reason = device.reason;
  if (device.failure) {
    before_.stack = device.failure->stack;
    before_.failing_step = device.failure->step;
  }
  before_.code_changes = list_code_changes(device);
}

std::string FixRuns::why_unproved(const MeasuredFix& fix, const Experiment& experiment) const {
  for (const Change& change : fix.changes) {
    if (change.settings.is_null()) continue;
    bool applied = false;
    for (const nlohmann::json& line : experiment.reported) {
      if (!line.contains("id") || line["id"] != find_fix(change.id)->id) continue;
      if (line.contains("not_applied")) return line["not_applied"].get<std::string>();
      applied = true;
    }
    // What ran out before it came so far is run again with more memory.
    if (!applied && !experiment.ran_out()) return fmt::format("{} found nothing to change", change.label);
  }
  if (!experiment.passed() && !experiment.ran_out()) return experiment.why;
  const bool same_batch =
      std::none_of(fix.changes.begin(), fix.changes.end(), [](const Change& change) { return change.changes_batch(); });
  const std::vector<nlohmann::json> outputs = read_profile(experiment.reported).outputs;
  const std::size_t both = std::min(outputs.size(), profile_.outputs.size());
  if (same_batch && !std::equal(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(both),
                                profile_.outputs.begin(), same_shapes)) {
    return "the outputs of the model have other shapes with it";
  }
  return {};
}

/// What a user of the framework writes, where it has an argument for the one change.
std::optional<std::vector<std::string>> FixRuns::lines_of_framework(const MeasuredFix& fix) const {
  if (fix.changes.size() != 1) return std::nullopt;
  const std::string_view framework = find_framework(fmt::format("{}", fmt::join(before_.stack, "\n")));
  const Change& change = fix.changes.front();
  return lines_in_framework(framework, change.id, change.batch);
}

void FixRuns::take(MeasuredFix& fix, const Experiment& experiment, bool on_gpu) const {
  fix.unproved = why_unproved(fix, experiment);
  if (!fix.unproved.empty() || !experiment.passed()) return;
  fix.measured_peak_bytes = experiment.allocated_bytes;
  fix.measured_reserved_bytes = experiment.reserved_bytes;
  fix.step = cost_of_step(*experiment.report);
  fix.fits = on_gpu;
  fix.still_grows = before_.grows && grows(*experiment.report);
  fix.lines.clear();
  for (const Change& change : fix.changes) {
    fix.lines.insert(fix.lines.end(), change.lines.begin(), change.lines.end());
  }
  if (const auto lines = lines_of_framework(fix)) {
    fix.lines = *lines;
    return;
  }
  for (const nlohmann::json& line : experiment.reported) {
    if (!line.contains("lines")) continue;
    const auto lines = line["lines"].get<std::vector<std::string>>();
    const bool known = std::search(fix.lines.begin(), fix.lines.end(), lines.begin(), lines.end()) != fix.lines.end();
    if (!known) fix.lines.insert(fix.lines.end(), lines.begin(), lines.end());
  }
}

}  // namespace oomdiag
