#include "profiler/report/words/cause_text.h"

#include <fmt/format.h>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/report.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {

std::string cause_text(const ReportCause& cause) {
  constexpr size_t kMaxCharacters = 400;
  const CauseRow& row = find_cause_row(cause.kind, cause.because);
  return printable(row.words(cause.evidence, cause.non_pytorch), kMaxCharacters);
}

std::string required_range(int64_t least_bytes, int64_t cached_bytes) {
  constexpr int64_t kNear = 100;  // a part
  if (cached_bytes * kNear <= least_bytes) return with_unit(least_bytes);
  return fmt::format("{} to {}", with_unit(least_bytes), with_unit(least_bytes + cached_bytes));
}

void decide_again(ReportCause& cause) {
  const CauseRow& row = decide_cause(cause.evidence);
  cause.kind = row.kind;
  cause.because = row.because;
  cause.short_by_bytes = row.short_by(cause.evidence);
}

}  // namespace oomdiag
