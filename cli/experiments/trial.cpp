#include "cli/experiments/trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "cli/process/environment.h"
#include "cli/process/workers.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "cli/terminal/json_text.h"
#include "profiler/error.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

DiagnosisRequest to_diagnosis(const TrialRequest& trial, const Install& install, const fs::path& base) {
  DiagnosisRequest request{.program = trial.program,
                           .device = trial.device,
                           .base = base,
                           .batch = trial.batch,
                           .keeps_output = true,
                           .environment = trial.environment,
                           .rank = trial.rank,
                           .steady = trial.steady,
                           .judged_bytes = trial.judged_bytes};
  if (!trial.remedies.is_null()) {
    request.environment.emplace_back("PYTHONPATH", before_python_path(install.injected()));
    request.environment.emplace_back("OOMDIAG_REMEDIES", to_text(trial.remedies, kCompact));
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

void take_figures(Trial& trial) {
  const Report& report = *trial.report;
  trial.outcome = report.outcome;
  if (report.main_device >= report.devices.size()) return;
  const ReportOfDevice& device = report.devices[report.main_device];
  trial.allocated_bytes = device.peak.allocated_bytes;
  trial.reserved_bytes = device.peak.reserved_bytes;
  trial.outside_bytes = device.card.outside_pytorch_bytes;
  trial.total_bytes = device.device.total_bytes;
  trial.needed_bytes = needed_bytes(device);
  trial.place = place_of_failure(device);
}

Trial read_trial(const Executed& executed) {
  const fs::path& folder = executed.folder;
  Trial trial{.exit_code = executed.exit_code,
              .why = executed.why_no_report,
              .stopped_at_step = executed.stopped_at_step,
              .seconds = executed.seconds};
  if (!folder.empty()) trial.told = read_lines(folder / "remedies");
  if (executed.has_report()) {
    trial.report = load_report(folder / "report.json");
    take_figures(trial);
  }
  const int code = trial.exit_code;
  if (trial.passed() && code != 0) trial.outcome = "failed";
  const bool says_why =
      executed.has_report() || code != 0;  // else all is well with the program, and nothing was seen of it
  if (!trial.passed() && !trial.ran_out() && !folder.empty() && says_why) {
    trial.why = fmt::format("it ended with exit code {}: {}", code, last_line(folder / "output.txt"));
  }
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return trial;
}

}  // namespace

int64_t needed_bytes(const ReportOfDevice& device) {
  return device.failure ? device.failure->reserved_bytes + device.failure->requested_bytes : device.peak.reserved_bytes;
}

std::string place_of_failure(const ReportOfDevice& device) {
  if (!device.failure) return {};
  return fmt::format("{}, step {}", name_of(device.failure->phase), device.failure->step);
}

std::vector<Trial> Trials::run(const std::vector<TrialRequest>& requests,
                               const std::function<void(std::size_t)>& tell) {
  std::vector<DiagnosisRequest> runs;
  for (const TrialRequest& request : requests) runs.push_back(to_diagnosis(request, install_, folder_.path()));
  finished_.assign(requests.size(), std::nullopt);
  std::vector<Trial> trials;
  try {
    for (const Executed& executed : executor_.run(runs, tell)) trials.push_back(read_trial(executed));
  } catch (const Interrupted&) {
    std::ranges::transform(executor_.finished(), finished_.begin(), [](const std::optional<Executed>& executed) {
      return executed ? std::optional(read_trial(*executed)) : std::nullopt;
    });
    throw;
  }
  return trials;
}

Trial Trials::run(const TrialRequest& request, const std::function<void(std::size_t)>& tell) {
  return std::move(run(std::vector<TrialRequest>{request}, tell).front());
}

}  // namespace oomdiag
