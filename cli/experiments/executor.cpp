#include "cli/experiments/executor.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/launch/diagnosis.h"
#include "cli/process/workers.h"
#include "cli/python/install.h"
#include "cli/terminal/json_text.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

/// 128 + SIGABRT: so a Python program ends now and then that is done (docs/trust.md). It is run once more.
constexpr int kAborted = 128 + SIGABRT;

/// In the process of the run.
std::string diagnose_for_another(const DiagnosisRequest& request, const Install& install) {
  nlohmann::json answer;
  const auto begin = std::chrono::steady_clock::now();
  try {
    const Diagnosis diagnosis = diagnose(request, install);
    const std::string folder = diagnosis.folder.string();
    answer = {{"folder", std::vector<uint8_t>(folder.begin(), folder.end())},  // a path need not be UTF-8
              {"exit_code", diagnosis.ending.code()},
              {"stopped_at_step", diagnosis.stopped_at_step},
              {"why", diagnosis.why_no_report},
              {"stages", diagnosis.stages},
              {"seconds", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
  } catch (const Error& error) {
    answer = {{"error", error.what()}, {"hint", error.hint()}, {"kind", static_cast<int>(error.kind())}};
  }
  return to_text(answer, kCompact);
}

Executed read_answer(const std::optional<std::string>& text) {
  const auto answer = nlohmann::json::parse(text.value_or(""), nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) {
    return {.exit_code = 128 + SIGKILL,
            .why_no_report = "the process of oomdiag that ran it was ended, as by the kernel for want of host memory"};
  }
  if (answer.contains("error")) {
    throw Error(static_cast<ErrorKind>(answer["kind"].get<int>()), answer["error"].get<std::string>(),
                answer["hint"].get<std::string>());
  }
  const auto folder = answer["folder"].get<std::vector<uint8_t>>();
  return {.folder = std::string(folder.begin(), folder.end()),
          .exit_code = answer["exit_code"],
          .stopped_at_step = answer["stopped_at_step"],
          .why_no_report = answer["why"],
          .stages = answer["stages"].get<std::vector<int>>(),
          .seconds = answer["seconds"]};
}

/// Of the largest program that has run so far.
int64_t bytes_of_a_program() {
  rusage usage{};
  return getrusage(RUSAGE_CHILDREN, &usage) == 0 ? int64_t{usage.ru_maxrss} * 1024 : 0;
}

int runs_at_once(const std::vector<DiagnosisRequest>& requests) {
  const bool shares_gpu =
      std::ranges::any_of(requests, [](const DiagnosisRequest& request) { return !request.device.is_virtual(); });
  return shares_gpu ? 1 : programs_at_once(bytes_of_a_program());
}

}  // namespace

void Executor::run_once(const std::vector<DiagnosisRequest>& requests, const std::vector<std::size_t>& which,
                        const std::function<void(std::size_t)>& on_done) {
  std::vector<std::function<std::string()>> works;
  for (const std::size_t i : which) {
    works.emplace_back([&, i] { return diagnose_for_another(with_fork(requests[i]), install_); });
  }
  std::optional<Error> failure;
  run_each_in_a_process(works, runs_at_once(requests), [&](std::size_t work, const std::optional<std::string>& answer) {
    try {
      finished_[which[work]] = read_answer(answer);
    } catch (const Error& error) {
      failure = error;
    }
    on_done(++count_);
  });
  if (failure) throw Error(*failure);
}

DiagnosisRequest Executor::with_fork(DiagnosisRequest request) const {
  for (const auto& one : forking_) {
    if (one->serves(request)) request.forked_by = one->socket();
  }
  return request;
}

// A single run takes no longer without: its imports are made once in any case.
void Executor::start_forking(const std::vector<DiagnosisRequest>& requests) {
  if (!forks_ || count_ + requests.size() < 2) return;
  for (const DiagnosisRequest& request : requests) {
    if (std::ranges::any_of(forking_, [&](const auto& one) { return one->serves(request); })) continue;
    if (auto made = ForkingPython::start(request, install_)) forking_.push_back(std::move(made));
  }
}

std::vector<Executed> Executor::run(const std::vector<DiagnosisRequest>& requests,
                                    const std::function<void(std::size_t)>& on_done) {
  finished_.assign(requests.size(), std::nullopt);
  start_forking(requests);
  std::vector<std::size_t> which(requests.size());
  std::iota(which.begin(), which.end(), std::size_t{0});
  run_once(requests, which, on_done);
  std::erase_if(which, [&](std::size_t i) { return finished_[i]->exit_code != kAborted; });
  for (const std::size_t i : which) {
    std::error_code ignored;
    std::filesystem::remove_all(finished_[i]->folder, ignored);
    finished_[i].reset();
  }
  run_once(requests, which, on_done);
  std::vector<Executed> results;
  for (std::optional<Executed>& one : finished_) results.push_back(std::move(*one));
  finished_.clear();
  return results;
}

}  // namespace oomdiag
