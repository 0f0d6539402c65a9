#include "cli/experiments/experiment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "cli/experiments/complete.h"
#include "cli/experiments/executor.h"
#include "cli/launch/diagnosis.h"
#include "cli/process/environment.h"
#include "cli/process/kept_input.h"
#include "cli/process/workers.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "cli/reports/run_work.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/terminal.h"
#include "extension/environment.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/op_calls.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

DiagnosisRequest to_diagnosis(const ExperimentRequest& experiment, const Install& install, const fs::path& base) {
  DiagnosisRequest request{.program = experiment.program,
                           .device = experiment.device,
                           .base = base,
                           .batch = experiment.batch,
                           .is_metered = experiment.is_metered,
                           .keeps_arguments = experiment.keeps_allocations && experiment.device.is_virtual(),
                           .keeps_output = true,
                           .environment = experiment.environment,
                           .rank = experiment.rank,
                           .steady = experiment.steady,
                           .judged_bytes = experiment.judged_bytes};
  if (!experiment.fixes.is_null()) {
    request.environment.emplace_back("PYTHONPATH", before_python_path(install.injected()));
    request.environment.emplace_back(variables::kFixes, to_text(experiment.fixes, kCompact));
  }
  return request;
}

std::vector<nlohmann::json> read_lines(const fs::path& file) {
  std::vector<nlohmann::json> lines;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    auto value = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (value.is_object()) lines.push_back(std::move(value));
  }
  return lines;
}

void take_figures(Experiment& experiment) {
  const Report& report = *experiment.report;
  experiment.outcome = report.outcome;
  const ReportOfDevice* const device = main_device_of(report);
  if (device == nullptr) return;
  experiment.allocated_bytes = device->peak.allocated_bytes;
  experiment.reserved_bytes = device->peak.reserved_bytes;
  experiment.non_pytorch_bytes = device->memory.non_pytorch_bytes;
  experiment.total_bytes = device->device.total_bytes;
  experiment.memory_fraction = device->device.memory_fraction();
  experiment.needed_bytes = needed_bytes(*device);
  experiment.place = place_of_failure(*device);
  experiment.failed_at_step = step_to_reach(report);
  experiment.growth_bytes = growth_of(*device);
  if (experiment.passed() && device->peak.host_memory_bytes > 0)
    experiment.outcome = "out_of_memory";  // of the GPU's own
}

/// Those of its only process.
AllocationSequence read_allocations(const Executed& executed) {
  const std::vector<fs::path> traces = find_traces(executed.folder);
  if (traces.size() != 1) return {.unusable = "it has several processes"};
  AllocationSequence sequence = read_allocation_sequence(load_trace(traces.front()));
  if (executed.stopped_at_step > 0) sequence.ended = false;
  std::ifstream arguments(executed.folder / kArgumentsFile);  // not beside the trace of a rank, which moves
  sequence.calls = read_op_calls(arguments);
  return sequence;
}

std::shared_ptr<const RecordedStep> read_step(const Executed& executed) {
  const std::vector<fs::path> traces = find_traces(executed.folder);
  if (traces.size() != 1) return nullptr;
  auto step = std::make_shared<RecordedStep>();
  step->run = load_explained(traces.front());
  if (step->run.trace == nullptr) return nullptr;
  step->forward_ns = read_forward_times(traces.front(), *step->run.trace, step->run.report);
  return step;
}

/// `kept`: what of the run is kept besides its figures; null: nothing.
Experiment read_experiment(const Executed& executed, const ExperimentRequest* kept) {
  const fs::path& folder = executed.folder;
  Experiment experiment{.exit_code = executed.exit_code,
                        .why = executed.why_no_report,
                        .stopped_at_step = executed.stopped_at_step,
                        .seconds = executed.seconds};
  if (!folder.empty()) experiment.reported = read_lines(folder / "fixes");
  if (executed.has_report()) {
    experiment.report = load_report(folder / "report.json");
    take_figures(experiment);
  }
  const int code = experiment.exit_code;
  if (experiment.passed() && code != 0) experiment.outcome = "failed";
  const bool says_why =
      executed.has_report() || code != 0;  // else all is well with the program, and nothing was seen of it
  if (!experiment.passed() && !experiment.ran_out() && !folder.empty() && says_why) {
    experiment.why = fmt::format("it ended with exit code {}: {}", code, last_line(folder / "output.txt"));
  }
  if (kept != nullptr && experiment.passed()) {
    if (kept->keeps_allocations) experiment.allocations = read_allocations(executed);
    if (kept->keeps_step) experiment.step = read_step(executed);
  }
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return experiment;
}

}  // namespace

int64_t needed_bytes(const ReportOfDevice& device) {
  return device.failure ? device.failure->reserved_bytes + device.failure->requested_bytes : device.peak.reserved_bytes;
}

std::string place_of_failure(const ReportOfDevice& device) {
  const auto place = [](const auto& moment) { return fmt::format("{}, step {}", name_of(moment.phase), moment.step); };
  if (device.failure) return place(*device.failure);
  return device.peak.host_memory_bytes > 0 ? place(device.peak) : "";
}

void Experiments::keep_stdin() {
  const std::filesystem::path file = folder_.path() / "stdin";
  const KeptInput kept = keep_input(STDIN_FILENO, file);
  if (kept.bytes > 0) input_ = file;
  if (!kept.is_whole)
    say(fmt::format("of stdin {} are given to each run: it has more, or is still open", with_unit(kept.bytes)));
}

std::vector<Experiment> Experiments::run(const std::vector<ExperimentRequest>& requests,
                                         const std::function<void(std::size_t)>& on_done) {
  std::vector<DiagnosisRequest> runs;
  for (const ExperimentRequest& request : requests) {
    runs.push_back(to_diagnosis(request, install_, folder_.path()));
    runs.back().input = input_;
  }
  finished_.assign(requests.size(), std::nullopt);
  std::vector<Experiment> experiments;
  try {
    for (const Executed& executed : executor_.run(runs, on_done)) {
      experiments.push_back(read_experiment(executed, &requests[experiments.size()]));
    }
  } catch (const Interrupted&) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const std::optional<Executed>& executed = executor_.finished()[i];
      if (executed) finished_[i] = read_experiment(*executed, requests[i].keeps_step ? &requests[i] : nullptr);
    }
    throw;
  }
  return experiments;
}

Experiment Experiments::run(const ExperimentRequest& request, const std::function<void(std::size_t)>& on_done) {
  return std::move(run(std::vector<ExperimentRequest>{request}, on_done).front());
}

}  // namespace oomdiag
