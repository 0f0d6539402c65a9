#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/causes/causes.h"
#include "profiler/report/report.h"

// Two reports of one program side by side: what grew and what shrank. Sums by name are compared, so that neither addresses nor
// the order of allocations matter, and what differs by less than runs of the same program do is left out.
namespace oomdiag {

struct DiffRow {
  std::string name;
  int64_t before = 0, after = 0;
  /// One report lists only its largest names, and this is none of them: it is taken to hold as much as it can without being
  /// listed, so that the change is at least this one.
  bool at_least = false;

  int64_t change() const { return after - before; }
  bool operator==(const DiffRow&) const = default;
};

struct ReportDiff {
  std::string outcome_before, outcome_after;
  std::optional<CauseKind> cause_before{}, cause_after{};        ///< none where nothing failed
  std::vector<DiffRow> figures{};                                ///< peak allocated and reserved, growth per step
  std::vector<DiffRow> categories{}, modules{}, ops{}, lines{};  ///< at the described moments, the largest change first

  bool is_empty() const {
    return outcome_before == outcome_after && cause_before == cause_after && figures.empty() && categories.empty() &&
           modules.empty() && ops.empty() && lines.empty();
  }
  bool operator==(const ReportDiff&) const = default;
};

/// What counts: a change of `least_bytes`, and, but for growth per step, of a thousandth of what is allocated.
struct DiffOptions {
  int64_t least_bytes = 64 << 10;
};

/// Compares the GPUs that the reports are about.
ReportDiff diff(const Report& before, const Report& after, const DiffOptions& options = {});

/// As people read it; `before` and `after` name the reports, `unicode` as in TextOptions.
std::string to_text(const ReportDiff& diff, bool unicode = true, const std::string& before = {},
                    const std::string& after = {});
std::string to_json(const ReportDiff& diff);

}  // namespace oomdiag
