#include "profiler/report/words/cause_text.h"

#include "profiler/explain/causes/causes.h"
#include "profiler/report/report.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {

std::string cause_text(const ReportCause& cause) {
  constexpr size_t kMaxCharacters = 400;
  const CauseRow& row = find_cause_row(cause.kind, cause.because);
  return printable(row.words(cause.evidence, cause.non_pytorch), kMaxCharacters);
}

void decide_again(ReportCause& cause) {
  const CauseRow& row = decide_cause(cause.evidence);
  cause.kind = row.kind;
  cause.because = row.because;
  cause.short_by_bytes = row.short_by(cause.evidence);
}

}  // namespace oomdiag
