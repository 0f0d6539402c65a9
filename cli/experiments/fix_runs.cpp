#include "cli/experiments/fix_runs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cli/experiments/complete.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fix.h"
#include "cli/launch/steady.h"
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
  request.steady.at_least = step_;
  if (place == Place::with_ample_memory) {
    request.judged_bytes = target_.device.bytes_of_device();
    request.device = {.device = with_ample_memory(target_.device)};
    request.steady = until_step(step_);
  }
  request.steady.without_steps = std::max(request.steady.without_steps, time_);
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

void FixRuns::require_same_failure(const Experiment& first) const {
  if (!first.passed() && !first.ran_out()) {
    throw Error(ErrorKind::environment, fmt::format("the program fails, and not for want of memory: {}", first.why),
                "all that it says is shown by: oomdiag run -- PROGRAM");
  }
  const auto& recorded = target_.recorded;
  if (!recorded || !recorded->is_same || recorded->place.empty() || first.ran_out()) return;
  const bool reads_input = read_profile(first.reported).reads_input;
  throw Error(ErrorKind::environment,
              fmt::format("the program does not run out of memory again, as it did in {}: {}", recorded->place,
                          reads_input ? "it reads stdin, which has something else now, or nothing"
                                      : "what it does depends on chance, on time or on something outside of it"),
              reads_input ? "give it once more, for each run to read: oomdiag fix FOLDER < FILE"
                          : "fix random seeds, give it the same files, and record it again: oomdiag run -- PROGRAM");
}

// The program that is to be fixed may run out late, as after an epoch: each run goes as far as that one did. Where nobody knows
// how far that is, the first one shows it; the complete run, which is made beside it, is made anew where it ended earlier.
// A program that grows from step to step has no steady need: it is run as far as it came before, and a little further.
void FixRuns::profile_the_complete_run(bool keeps_step) {
  const auto complete_run = [&] {
    ExperimentRequest complete = request({}, Place::with_ample_memory);
    complete.keeps_step = keeps_step;
    return complete;
  };
  std::vector<ExperimentRequest> requests{request({}, Place::gpu), complete_run()};
  if (!target_.recorded) requests.front().steady.at_least = kMaxSteps;
  std::vector<Experiment> experiments(requests.size());
  make(requests, [&](std::size_t i, const Experiment& experiment) { experiments[i] = experiment; });
  const Experiment &first = experiments[0], &whole = experiments[1];
  require_same_failure(first);
  if (first.ran_out()) {
    step_ = std::max(step_, step_to_reach(*first.report));
    time_ = std::chrono::seconds(std::llround(2 * first.seconds));
    const bool is_early = whole.stopped_at_step > 0 && whole.stopped_at_step <= step_;
    if (is_early) make({complete_run()}, [&](std::size_t, const Experiment& again) { experiments[1] = again; });
  }
  take_before(first, whole);
}

void FixRuns::take_before(const Experiment& first, const Experiment& whole) {
  before_.outcome = first.outcome;
  before_.place = first.place;
  const bool was_cut_short = whole.stopped_at_step > 0 && whole.passed() && grows(*whole.report);
  before_.is_whole = whole.passed() && !was_cut_short && !is_share_of_gpu(whole.allocated_bytes, whole.total_bytes);
  whole_ = before_.is_whole ? whole : first;
  profile_ = read_profile(whole.reported);
  weigh_blocks(profile_, *whole_.report);
  const Experiment& seen = first.passed() ? first : whole_;  // what fits shows its need on the GPU, too
  before_.stopped_at_step = seen.stopped_at_step;
  before_.allocated_bytes = seen.allocated_bytes;
  before_.reserved_bytes = seen.reserved_bytes;
  before_.available_bytes = first.available_bytes(first.total_bytes);
  before_.step = cost_of_step(*seen.report);
  before_.required_bytes = seen.allocated_bytes + first.non_pytorch_bytes;
  const ReportOfDevice* const main = main_device_of(*first.report);
  if (main == nullptr) return;
  const ReportOfDevice& device = *main;
  before_.grows = !device.growth.empty();
  if (before_.grows && first.passed()) before_.code_changes = list_code_changes(device);
  if (!first.ran_out()) return;
  offered_ = device.fixes;
  if (const ReportOfDevice* const complete = main_device_of(*whole_.report); complete != nullptr && before_.is_whole)
    offered_.insert(offered_.end(), complete->fixes.begin(), complete->fixes.end());
  if (device.cause) before_.cause = name_of(device.cause->kind);
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
  if (same_batch && !same_outputs(read_profile(experiment.reported).outputs, profile_.outputs)) {
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
