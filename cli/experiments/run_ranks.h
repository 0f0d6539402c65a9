#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/diagnosis.h"
#include "cli/launch/ranks.h"
#include "cli/python/install.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// A rank that is run, and those that are taken to be like it: "0-15 but 15", empty if it stands for itself.
struct RankKind {
  int rank = 0;
  std::string stands_for{};

  bool operator==(const RankKind&) const = default;
};

/// One rank of each kind in a world of so many: each stage of `stages`, the ranks of one pipeline in their order (none: there
/// is one), and of each the first and the last, whose shards differ where something does not divide evenly.
std::vector<RankKind> find_kinds(int world_size, const std::vector<int>& stages);

/// What came of several ranks.
struct RanksDiagnosis {
  std::filesystem::path folder;  ///< a run folder with a folder for each rank
  std::vector<RankKind> kinds;
  std::vector<int> exit_codes;          ///< in the order of `kinds`
  std::vector<std::string> why_failed;  ///< likewise: what a rank said last that did not end well
  std::optional<Report> report;         ///< on all

  int exit_code() const;  ///< the first that is not 0
};

/// Runs ranks of the job, each alone, with an Executor; without a report yet. Throws Error if one cannot be started,
/// Interrupted.
RanksDiagnosis run_ranks(const Job& job, const DiagnosisRequest& request, const Install& install,
                         const std::function<void(std::size_t)>& on_done);

/// Makes the report on all of them. Throws Error where it cannot.
void explain_ranks(RanksDiagnosis& ranks);

/// Which rank stands for which, and what those said that failed; empty where each stands for itself and all ended well.
std::string kinds_text(const RanksDiagnosis& diagnosis);

}  // namespace oomdiag
