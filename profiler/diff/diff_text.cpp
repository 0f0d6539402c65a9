#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "profiler/diff/diff.h"
#include "profiler/explain/causes/causes.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/json_text.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLabelColumns = 48;

int64_t largest_of(const ReportDiff& diff) {
  int64_t largest = 0;
  for (const auto* rows : {&diff.figures, &diff.categories, &diff.modules, &diff.ops, &diff.lines}) {
    for (const DiffRow& row : *rows) largest = std::max({largest, row.before, row.after});
  }
  return largest;
}

void add_rows(std::string& text, const char* title, const std::vector<DiffRow>& rows, const Unit& unit, bool words) {
  if (rows.empty()) return;
  text += "\n  " + padded(fmt::format("{}, {}", title, unit.name), kLabelColumns) +
          fmt::format("{:>10}{:>10}{:>11}\n", "before", "after", "change");
  for (const DiffRow& row : rows) {
    const std::string name = row.name.empty() ? "of unknown origin" : words ? in_words(row.name) : row.name;
    const std::string sign = std::string(row.at_least ? "≥ " : "") + (row.change() > 0 ? "+" : "-");
    text += "    " + padded(printable_end(name, kLabelColumns - 4), kLabelColumns - 2) +
            fmt::format("{:>10}{:>10}{:>11}\n", in_unit(row.before, unit), in_unit(row.after, unit),
                        sign + in_unit(std::abs(row.change()), unit));
  }
}

std::string ending(const std::string& outcome, const std::optional<CauseKind>& cause) {
  std::string text = in_words(outcome.empty() ? "unknown" : outcome);
  if (cause) text += fmt::format(" ({})", in_words(std::string(name_of(*cause))));
  return printable(text, 60);
}

Json rows_json(const std::vector<DiffRow>& rows) {
  Json json = Json::array();
  for (const DiffRow& row : rows) {
    json.push_back({{"name", text_or_null(row.name)},
                    {"before_bytes", row.before},
                    {"after_bytes", row.after},
                    {"change_bytes", row.change()},
                    {"at_least", row.at_least}});
  }
  return json;
}

}  // namespace

std::string to_text(const ReportDiff& diff, bool unicode) {
  if (diff.is_empty()) return "oomdiag: no difference\n";
  const Unit unit = unit_for(largest_of(diff));
  std::string text = "oomdiag: the reports differ\n";
  const std::string before = ending(diff.outcome_before, diff.cause_before);
  const std::string after = ending(diff.outcome_after, diff.cause_after);
  if (before != after) text += fmt::format("\n  {} before, {} after\n", before, after);
  add_rows(text, "in all", diff.figures, unit, true);
  add_rows(text, "by category", diff.categories, unit, true);
  add_rows(text, "by module", diff.modules, unit, false);
  add_rows(text, "by op", diff.ops, unit, false);
  add_rows(text, "by line", diff.lines, unit, false);
  return printable_lines(text, unicode);
}

std::string to_json(const ReportDiff& diff) {
  const auto or_null = [](const std::optional<CauseKind>& kind) { return text_or_null(kind ? name_of(*kind) : ""); };
  const Json json = {{"schema", "oomdiag-diff/1"},
                     {"equal", diff.is_empty()},
                     {"outcome", {{"before", diff.outcome_before}, {"after", diff.outcome_after}}},
                     {"cause", {{"before", or_null(diff.cause_before)}, {"after", or_null(diff.cause_after)}}},
                     {"figures", rows_json(diff.figures)},
                     {"categories", rows_json(diff.categories)},
                     {"modules", rows_json(diff.modules)},
                     {"ops", rows_json(diff.ops)},
                     {"lines", rows_json(diff.lines)}};
  return json_text(json, 2);
}

}  // namespace oomdiag
