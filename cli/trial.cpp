#include "cli/trial.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>

#include "cli/environment.h"
#include "cli/reports.h"
#include "cli/run_folder.h"
#include "cli/workers.h"
#include "extension/environment.h"
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
    request.environment.emplace_back(variables::kRemedies, trial.remedies.dump());
  }
  return request;
}

/// In the process of the trial: its folder holds the rest.
std::string diagnose_for_another(const TrialRequest& trial, const Install& install, const fs::path& base) {
  nlohmann::json answer;
  const auto begin = std::chrono::steady_clock::now();
  try {
    const Diagnosis diagnosis = diagnose(to_diagnosis(trial, install, base), install);
    answer = {{"folder", diagnosis.folder.string()},
              {"exit_code", diagnosis.ending.code()},
              {"stopped_at_step", diagnosis.stopped_at_step},
              {"why", diagnosis.why_no_report},
              {"has_report", diagnosis.report.has_value()},
              {"seconds", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
  } catch (const Error& error) {
    answer = {{"error", error.what()}, {"hint", error.hint()}, {"kind", static_cast<int>(error.kind())}};
  }
  return answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
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

Trial read_trial(const nlohmann::json& answer) {
  if (answer.contains("error")) {
    throw Error(static_cast<ErrorKind>(answer["kind"].get<int>()), answer["error"].get<std::string>(),
                answer["hint"].get<std::string>());
  }
  const fs::path folder = answer["folder"].get<std::string>();
  Trial trial{.exit_code = answer["exit_code"],
              .stopped_at_step = answer["stopped_at_step"],
              .seconds = answer["seconds"],
              .told = read_lines(folder / "remedies")};
  if (answer["has_report"].get<bool>()) {
    trial.report = load_report(folder / "report.json");
    take_figures(trial);
  } else {
    trial.why = answer["why"];
  }
  const int code = trial.exit_code;
  if (trial.passed() && code != 0) trial.outcome = "failed";
  if (!trial.passed() && !trial.ran_out() && trial.why.empty()) {
    trial.why = fmt::format("it ended with exit code {}: {}", code, last_line(folder / "output.txt"));
  }
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return trial;
}

/// 128 + SIGABRT: so a Python program ends now and then that is done (docs/trust.md). It is run once more.
constexpr int kAborted = 134;

/// Of the largest program that has run so far.
long bytes_of_a_program() {
  rusage usage{};
  return getrusage(RUSAGE_CHILDREN, &usage) == 0 ? usage.ru_maxrss * 1024 : 0;
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
  std::vector<Trial> trials = run_once(requests, tell);
  for (std::size_t i = 0; i < trials.size(); ++i) {
    if (trials[i].exit_code == kAborted) trials[i] = std::move(run_once({requests[i]}, tell).front());
  }
  return trials;
}

Trial Trials::run(const TrialRequest& request, const std::function<void(std::size_t)>& tell) {
  return std::move(run(std::vector<TrialRequest>{request}, tell).front());
}

std::vector<Trial> Trials::run_once(const std::vector<TrialRequest>& requests,
                                    const std::function<void(std::size_t)>& tell) {
  std::vector<std::function<std::string()>> works;
  for (const TrialRequest& request : requests) {
    works.emplace_back([&] { return diagnose_for_another(request, install_, folder_.path()); });
  }
  const bool shares_card = std::any_of(requests.begin(), requests.end(),
                                       [](const TrialRequest& request) { return !request.device.is_virtual(); });
  const auto answers = run_in_processes(works, shares_card ? 1 : programs_at_once(bytes_of_a_program()),
                                        [&](std::size_t over) { tell(count_ + over); });
  count_ += requests.size();
  std::vector<Trial> trials;
  for (const auto& answer : answers) {
    const auto json = nlohmann::json::parse(answer.value_or(""), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) throw Error(ErrorKind::internal, "a process that was to run the program died", "");
    trials.push_back(read_trial(json));
  }
  return trials;
}

}  // namespace oomdiag
