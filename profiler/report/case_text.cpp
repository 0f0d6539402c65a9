#include "profiler/report/case_text.h"

#include <fmt/format.h>

#include "profiler/report/table.h"

namespace oomdiag {
namespace {

constexpr size_t kColumns = 92;
constexpr size_t kMostCharacters = 2000;

/// `sentence` in lines of at most kColumns, cut between words.
std::string wrap(const std::string& sentence) {
  std::string text, line = "   ";
  for (size_t at = 0; at < sentence.size();) {
    const size_t end = std::min(sentence.find(' ', at), sentence.size());
    if (line.size() + 1 + end - at > kColumns && line.size() > 3) {
      text += line + "\n";
      line = "     ";
    }
    line += " " + sentence.substr(at, end - at);
    at = end + 1;
  }
  return text + line + "\n";
}

}  // namespace

std::string case_text(const ReportCase& reference_case) {
  const std::string id = reference_case.id.empty() ? "" : " " + printable(reference_case.id, 12);
  std::string text = fmt::format("  case{}: {}\n", id, printable(reference_case.about, 80));
  for (const std::string& note : reference_case.notes) {
    const std::string safe = printable(note, kMostCharacters);
    text += safe.starts_with("  ") ? "  " + safe + "\n" : wrap(safe);
  }
  return text;
}

}  // namespace oomdiag
