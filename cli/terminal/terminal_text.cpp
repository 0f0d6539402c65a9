#include "cli/terminal/terminal_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>

#include "cli/terminal/terminal.h"
#include "profiler/report/printable.h"

namespace oomdiag {
namespace {

constexpr std::size_t kWidthOfTables = 72;  ///< where the figures of a report end

/// The row without the bar behind its figures.
std::string_view without_bar(std::string_view row) {
  const std::size_t last = row.find_last_not_of(" #\u2588\u2589\u258a\u258b\u258c\u258d\u258e\u258f");
  return last == row.npos || row.substr(0, last + 1).find("  ") == row.npos ? row : row.substr(0, last + 1);
}

std::string narrowed_row(const std::string& row, std::size_t columns) {
  constexpr std::size_t kFewestBlanks = 2;
  if (count_columns(row) <= columns) return row;
  std::string shorter(without_bar(row));
  const std::size_t begin = shorter.find_first_not_of(' ');
  std::size_t longest = 0, at = 0;
  for (std::size_t i = begin; i < shorter.size(); ++i) {
    const std::size_t end = std::min(shorter.find_first_not_of(' ', i), shorter.size());
    if (end - i > longest) longest = end - i, at = i;
    i = std::max(i, end);
  }
  const std::size_t too_many = kWidthOfTables > columns ? kWidthOfTables - columns : 0;
  if (longest >= too_many + kFewestBlanks) shorter.erase(at, too_many);
  return shorter;
}

std::string coloured_row(std::string row) {
  for (const auto& [verdict, color] : {std::pair(" yes", 32), std::pair(" no", 31)}) {
    if (row.starts_with("    ") && row.ends_with(verdict))
      return fmt::format("{}\033[{}m{}\033[0m", row.substr(0, row.size() - std::string_view(verdict).size()), color,
                         verdict);
  }
  return row;
}

}  // namespace

std::string narrowed(const std::string& text, std::size_t columns) {
  std::istringstream rows(text);
  std::string row, shown;
  while (std::getline(rows, row)) shown += narrowed_row(row, columns) + "\n";
  return shown;
}

std::string terminal_text(const std::string& text, const OutputCapabilities& capabilities) {
  std::string fitting = capabilities.columns > 0 ? narrowed(text, capabilities.columns) : text;
  if (!capabilities.color) return fitting;
  std::istringstream rows(fitting);
  std::string row, shown;
  while (std::getline(rows, row)) {
    const bool is_headline = shown.empty();
    const bool is_failure = row.find("out of memory") != row.npos;
    shown += (is_headline ? fmt::format("\033[1{}m{}\033[0m", is_failure ? ";31" : "", row) : coloured_row(row)) + "\n";
  }
  return shown;
}

}  // namespace oomdiag
