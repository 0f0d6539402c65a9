#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/report/report.h"

// Budgets that a run must keep to, for scripts and CI.
namespace oomdiag {

struct Budgets {
  std::optional<int64_t> max_allocated_bytes{}, max_reserved_bytes{}, max_growth_bytes{};  ///< growth: per step
  std::optional<Report> baseline{};
  double tolerance = 0.02;  ///< by which figures may be above those of the baseline
};

/// What came of one budget.
struct Verdict {
  std::string budget;  ///< "max allocated"
  bool kept = true;
  std::string words;  ///< "12.30 GiB of 20.00 GiB", or why it was not kept

  bool operator==(const Verdict&) const = default;
};

/// One verdict for each budget, after one on whether the run came to its end: of one that ran out of memory no figure
/// says what it needs. Of several GPUs and ranks the highest figure counts.
std::vector<Verdict> check(const Report& report, const Budgets& budgets);

/// JUnit's XML, a test case for each verdict.
std::string to_junit(const std::vector<Verdict>& verdicts, const std::string& suite);

/// Annotations of GitHub Actions, one line for each budget that was not kept.
std::string to_github(const std::vector<Verdict>& verdicts, const std::string& suite);

}  // namespace oomdiag
