#include "samples/cases/note.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/printable.h"
#include "samples/cases/case_run.h"

namespace oomdiag {
namespace {

std::string with_underscores(std::string text) {
  std::replace(text.begin(), text.end(), ' ', '_');
  return text;
}

std::string label_of(const CaseRun& run) {
  if (run.report.outcome == "out_of_memory") return run.variant + ", out of memory";
  return run.facts.contains("raised") ? run.variant + ", raised" : run.variant;
}

using Rows = std::vector<std::pair<std::string, std::vector<int64_t>>>;

/// The unit of the largest figure, or the one below if a figure would read 0.00 and is not nothing.
Unit find_unit(const Rows& rows) {
  int64_t largest = 0, least = INT64_MAX;
  for (const auto& [label, cells] : rows) {
    for (const int64_t bytes : cells) {
      largest = std::max(largest, bytes);
      if (bytes > 0) least = std::min(least, bytes);
    }
  }
  const Unit unit = unit_for(largest);
  const bool too_coarse = unit.bytes > 1 && least < unit.bytes / 100;
  return too_coarse ? unit_for(unit.bytes - 1) : unit;
}

}  // namespace

void Note::table(std::string_view heading, const std::vector<std::string>& columns,
                 const std::vector<std::pair<std::string, std::vector<int64_t>>>& rows) {
  constexpr size_t kLabelColumns = 42;
  const Unit unit = find_unit(rows);
  const auto width = [](const std::string& column) { return std::max<size_t>(column.size() + 2, 11); };
  std::string line = "  " + padded(fmt::format("{}, {}", heading, unit.name), kLabelColumns);
  for (const auto& column : columns) line += fmt::format("{:>{}}", column, width(column));
  say(line);
  for (const auto& [label, cells] : rows) {
    line = "    " + padded(printable(label, kLabelColumns - 3), kLabelColumns - 2);
    for (size_t i = 0; i < cells.size(); ++i) {
      line += fmt::format("{:>{}}", cells[i] < 0 ? "" : in_unit(cells[i], unit), width(columns[i]));
    }
    say(line);
  }
}

void Note::compare(std::span<const CaseRun> runs, const std::vector<Column>& columns) {
  std::vector<std::string> names;
  for (const Column& column : columns) names.push_back(column.name);
  std::vector<std::pair<std::string, std::vector<int64_t>>> rows;
  for (const CaseRun& run : runs) {
    auto& cells = rows.emplace_back(label_of(run), std::vector<int64_t>()).second;
    for (const Column& column : columns) {
      cells.push_back(column.bytes_of(run));
      figure(fmt::format("{}.{}_bytes", run.variant, with_underscores(column.name)), cells.back());
    }
  }
  table("variant", names, rows);
}

}  // namespace oomdiag
