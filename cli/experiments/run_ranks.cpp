#include "cli/experiments/run_ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "cli/experiments/executor.h"
#include "cli/launch/diagnosis.h"
#include "cli/launch/ranks.h"
#include "cli/process/launcher.h"
#include "cli/process/workers.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "profiler/error.h"
#include "profiler/report/report.h"

// Each rank is diagnosed by a process of its own, in a run folder inside of ours; its trace and its output are then moved to
// rank-N, where the ranks of one job lie, so that all that reads run folders reads these too.

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

/// Moves what is left of a rank to its place and gives its last words, if it did not end well.
std::string take_over(const Executed& executed, const fs::path& folder, int rank) {
  const fs::path& from = executed.folder;
  if (from.empty()) return executed.why_no_report;
  const fs::path to = folder / fmt::format("{}{}", kRankFolder, rank);
  std::error_code ignored;
  const std::vector<fs::path> traces = find_traces(from);
  if (!traces.empty() && traces.front().parent_path() != from) fs::rename(traces.front().parent_path(), to, ignored);
  fs::create_directories(to, ignored);
  if (!traces.empty() && traces.front().parent_path() == from) fs::rename(traces.front(), to / "trace", ignored);
  fs::rename(from / "output.txt", to / "output.txt", ignored);
  fs::rename(from / "run.json", folder / "run.json", ignored);
  fs::remove_all(from, ignored);
  if (executed.exit_code == 0) return executed.why_no_report;
  return fmt::format("exit code {}: {}", executed.exit_code, last_line(to / "output.txt"));
}

class RankRuns {
 public:
  RankRuns(const Job& job, const DiagnosisRequest& request, const Install& install,
           const std::function<void(std::size_t)>& on_done)
      : job_(job), request_(request), executor_(install), on_done_(on_done) {
    result_.folder = make_run_folder(request.base, getpid());
    request_.base = result_.folder;
    request_.keeps_output = true;
    request_.shows_progress = false;
  }

  void run(const std::vector<RankKind>& kinds) {
    std::vector<DiagnosisRequest> requests(kinds.size(), request_);
    for (std::size_t i = 0; i < kinds.size(); ++i) requests[i].rank = SingleRank{.job = job_, .number = kinds[i].rank};
    const std::vector<Executed> executed = executor_.run(requests, on_done_);
    for (std::size_t i = 0; i < kinds.size(); ++i) keep(kinds[i], executed[i]);
  }

  const std::vector<int>& stages() const { return stages_; }
  RanksDiagnosis take_result() { return std::move(result_); }

 private:
  void keep(const RankKind& kind, const Executed& executed) {
    stages_ = executed.stages;
    result_.kinds.push_back(kind);
    result_.exit_codes.push_back(executed.exit_code);
    result_.why_failed.push_back(take_over(executed, result_.folder, kind.rank));
  }

  const Job& job_;
  DiagnosisRequest request_;
  Executor executor_;
  const std::function<void(std::size_t)>& on_done_;
  std::vector<int> stages_{};
  RanksDiagnosis result_{};
};

}  // namespace

int RanksDiagnosis::exit_code() const {
  const auto bad = std::find_if(exit_codes.begin(), exit_codes.end(), [](int code) { return code != 0; });
  return bad == exit_codes.end() ? 0 : *bad;
}

RanksDiagnosis run_ranks(const Job& job, const DiagnosisRequest& request, const Install& install,
                         const std::function<void(std::size_t)>& on_done) {
  RankRuns runs(job, request, install, on_done);
  if (!job.is_distinct) {
    std::vector<RankKind> kinds;
    for (const int rank : job.ranks) kinds.push_back({.rank = rank});
    runs.run(kinds);
    return runs.take_result();
  }
  runs.run({{.rank = 0}});  // shows by what it sends to whom which kinds there are
  const std::vector<RankKind> kinds = find_kinds(job.world_size, runs.stages());
  runs.run({kinds.begin() + 1, kinds.end()});
  RanksDiagnosis result = runs.take_result();
  result.kinds.front() = kinds.front();
  return result;
}

void explain_ranks(RanksDiagnosis& ranks) {
  if (find_traces(ranks.folder).empty()) return;
  const std::optional<std::string> text = run_apart([&] {
    const Ending ending{.exit_code = ranks.exit_code(), .signal = 0};
    const Report report = explain_run(ranks.folder, {.ending = ending}, /*write_each=*/true);
    keep_json(report, ranks.folder);
    return pack(report);
  });
  if (!text) throw Error(ErrorKind::environment, "no report: the host has not enough memory to read the traces");
  ranks.report = unpack(*text);
}

}  // namespace oomdiag
