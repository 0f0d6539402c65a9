#include "profiler/report/text/case_text.h"

#include <fmt/format.h>

#include "profiler/report/report.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

constexpr size_t kCaseColumns = 92;
constexpr size_t kMaxCharacters = 2000;

}  // namespace

std::string case_text(const ReportCase& reference_case) {
  const std::string id = reference_case.id.empty() ? "" : " " + printable(reference_case.id, 12);
  std::string text = fmt::format("  case{}: {}\n", id, printable(reference_case.about, 80));
  for (const std::string& note : reference_case.notes) {
    const std::string safe = printable(note, kMaxCharacters);
    text += safe.starts_with("  ") ? "  " + safe + "\n" : wrapped(safe, kCaseColumns);
  }
  return text;
}

}  // namespace oomdiag
