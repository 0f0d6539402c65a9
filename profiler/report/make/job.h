#pragma once

#include <optional>
#include <string>
#include <vector>

#include "profiler/report/report.h"

namespace oomdiag {

/// The report on one process of a job of several.
struct JobMember {
  Report report;
  std::string folder;  ///< inside of the run folder: "rank-0", "4711", or empty
  int pid = 0;
  uint64_t start_time_ns = 0;  ///< when its recording began, on a clock that all share
};

/// One report for all processes of a job. Its main fields are those of the one that failed first, else of the fullest; all
/// of them stand side by side in `ranks`. `exit_code` is the job's. At least one member.
Report merge_job(const std::vector<JobMember>& members, std::optional<int> exit_code);

}  // namespace oomdiag
