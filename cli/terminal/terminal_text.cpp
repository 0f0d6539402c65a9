#include "cli/terminal/terminal_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/terminal/terminal.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

constexpr std::size_t kFewestBlanks = 2;  ///< between two columns

struct Gap {
  std::size_t begin = 0, length = 0;
};

/// The longest run of blanks within the row.
Gap longest_gap(std::string_view row) {
  Gap longest;
  for (std::size_t at = row.find_first_not_of(' '); at < row.size();) {
    const std::size_t begin = std::min(row.find(' ', at), row.size());
    at = std::min(row.find_first_not_of(' ', begin), row.size());
    if (at - begin > longest.length) longest = {.begin = begin, .length = at - begin};
  }
  return longest;
}

/// The row without the bar behind its figures.
std::string without_bar(const std::string& row) {
  const std::size_t last = row.find_last_not_of(" #\u2588\u2589\u258a\u258b\u258c\u258d\u258e\u258f");
  const std::string bare = row.substr(0, last + 1);
  return longest_gap(bare).length < kFewestBlanks ? row : bare;
}

/// A title, and rows that are indented further.
bool is_table(const std::vector<std::string>& rows) {
  const auto is_row = [](const std::string& row) { return row.starts_with("    "); };
  return rows.size() > 1 && std::all_of(rows.begin() + 1, rows.end(), is_row);
}

std::size_t widest(const std::vector<std::string>& rows) {
  std::size_t columns = 0;
  for (const std::string& row : rows) columns = std::max(columns, count_columns(row));
  return columns;
}

void narrow_table(std::vector<std::string>& rows, std::size_t columns) {
  if (widest(rows) > columns) std::ranges::transform(rows, rows.begin(), without_bar);
  const std::size_t width = widest(rows);
  if (width <= columns) return;
  for (std::string& row : rows) {
    const Gap gap = longest_gap(row);
    if (gap.length > kFewestBlanks) row.erase(gap.begin, std::min(width - columns, gap.length - kFewestBlanks));
  }
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
  std::istringstream lines(text);
  std::vector<std::string> part;  // up to an empty line
  std::string line, shown;
  const auto show_part = [&] {
    if (is_table(part)) narrow_table(part, columns);
    for (const std::string& row : part) shown += row + "\n";
    part.clear();
  };
  while (std::getline(lines, line)) {
    if (!line.empty()) {
      part.push_back(line);
      continue;
    }
    show_part();
    shown += "\n";
  }
  show_part();
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
