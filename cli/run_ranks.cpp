#include "cli/run_ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/reports.h"
#include "cli/run_folder.h"
#include "cli/workers.h"
#include "profiler/error.h"

// Each rank is diagnosed by a process of its own, in a run folder inside of ours; its trace and its output are then moved to
// rank-N, where the ranks of one job lie, so that all that reads run folders reads these too.

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

/// In the process of the rank.
std::string diagnose_rank(const Job& job, int rank, DiagnosisRequest request, const Install& install) {
  nlohmann::json answer;
  try {
    request.rank = LoneRank{.job = job, .number = rank};
    request.keeps_output = true;
    request.shows_progress = false;
    const Diagnosis diagnosis = diagnose(request, install);
    answer = {{"folder", diagnosis.folder.string()},
              {"exit_code", diagnosis.ending.code()},
              {"stages", diagnosis.stages},
              {"why", diagnosis.why_no_report}};
  } catch (const Error& error) {
    answer = {{"error", error.what()}, {"hint", error.hint()}, {"kind", static_cast<int>(error.kind())}};
  }
  return answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Moves what is left of a rank to its place and gives its last words, if it did not end well.
std::string take_over(const nlohmann::json& answer, const fs::path& folder, int rank) {
  const fs::path from = answer["folder"].get<std::string>();
  const fs::path to = folder / fmt::format("{}{}", kRankFolder, rank);
  std::error_code ignored;
  const std::vector<fs::path> traces = find_traces(from);
  if (!traces.empty() && traces.front().parent_path() != from) fs::rename(traces.front().parent_path(), to, ignored);
  fs::create_directories(to, ignored);
  if (!traces.empty() && traces.front().parent_path() == from) fs::rename(traces.front(), to / "trace", ignored);
  fs::rename(from / "output.txt", to / "output.txt", ignored);
  fs::rename(from / "run.json", folder / "run.json", ignored);
  fs::remove_all(from, ignored);
  if (answer["exit_code"].get<int>() == 0) return answer["why"].get<std::string>();
  return fmt::format("exit code {}: {}", answer["exit_code"].get<int>(), last_line(to / "output.txt"));
}

class RankRuns {
 public:
  RankRuns(const Job& job, const DiagnosisRequest& request, const Install& install,
           const std::function<void(std::size_t)>& tell)
      : job_(job), request_(request), install_(install), tell_(tell) {
    result_.folder = make_run_folder(request.base, getpid());
    request_.base = result_.folder;
  }

  void run(const std::vector<RankKind>& kinds) {
    std::vector<std::function<std::string()>> works;
    for (const RankKind& kind : kinds) {
      works.emplace_back([this, kind] { return diagnose_rank(job_, kind.rank, request_, install_); });
    }
    const std::size_t before = result_.kinds.size();
    const auto answers = run_in_processes(works, programs_at_once(0), [&](std::size_t over) { tell_(before + over); });
    for (std::size_t i = 0; i < kinds.size(); ++i) keep(kinds[i], answers[i].value_or(""));
  }

  std::vector<int> stages() const { return stages_; }

  RanksDiagnosis finish() {
    if (find_traces(result_.folder).empty()) return std::move(result_);
    const Ending ending{.exit_code = result_.exit_code(), .signal = 0};
    result_.report = explain_run(result_.folder, {.ending = ending}, /*write_each=*/true);
    keep_json(*result_.report, result_.folder);
    return std::move(result_);
  }

 private:
  void keep(const RankKind& kind, const std::string& text) {
    const auto answer = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!answer.is_object()) throw Error(ErrorKind::internal, "a process that was to run a rank died", "");
    if (answer.contains("error")) {
      throw Error(static_cast<ErrorKind>(answer["kind"].get<int>()), answer["error"].get<std::string>(),
                  answer["hint"].get<std::string>());
    }
    stages_ = answer["stages"].get<std::vector<int>>();
    result_.kinds.push_back(kind);
    result_.exit_codes.push_back(answer["exit_code"].get<int>());
    result_.why_failed.push_back(take_over(answer, result_.folder, kind.rank));
  }

  const Job& job_;
  DiagnosisRequest request_;
  const Install& install_;
  const std::function<void(std::size_t)>& tell_;
  std::vector<int> stages_{};
  RanksDiagnosis result_{};
};

}  // namespace

int RanksDiagnosis::exit_code() const {
  const auto bad = std::find_if(exit_codes.begin(), exit_codes.end(), [](int code) { return code != 0; });
  return bad == exit_codes.end() ? 0 : *bad;
}

RanksDiagnosis diagnose_ranks(const Job& job, const DiagnosisRequest& request, const Install& install,
                              const std::function<void(std::size_t)>& tell) {
  RankRuns runs(job, request, install, tell);
  std::vector<RankKind> kinds;
  for (const int rank : job.ranks) kinds.push_back({.rank = rank});
  if (job.is_distinct) {
    runs.run({{.rank = 0}});  // tells by what it sends to whom which kinds there are
    kinds = find_kinds(job.world_size, runs.stages());
    const RankKind first = kinds.front();
    kinds.erase(kinds.begin());
    runs.run(kinds);
    RanksDiagnosis result = runs.finish();
    result.kinds.front() = first;
    return result;
  }
  runs.run(kinds);
  return runs.finish();
}

}  // namespace oomdiag
