#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "profiler/counted.h"
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

bool shows_change(const DiffRow& row, const Unit& unit) {
  return in_unit(std::abs(row.change()), unit).find_first_of("123456789") != std::string::npos;
}

std::vector<DiffRow> all_rows(const ReportDiff& diff) {
  std::vector<DiffRow> all;
  for (const auto* rows : {&diff.figures, &diff.categories, &diff.modules, &diff.ops, &diff.lines})
    all.insert(all.end(), rows->begin(), rows->end());
  return all;
}

/// That of the largest figure, unless a change is nothing in it: then that of the largest change.
Unit choose_unit(const std::vector<DiffRow>& rows) {
  int64_t largest = 0, largest_change = 0;
  for (const DiffRow& row : rows) {
    largest = std::max({largest, row.before, row.after});
    largest_change = std::max(largest_change, std::abs(row.change()));
  }
  const Unit unit = unit_for(largest);
  const bool shows_all = std::ranges::all_of(rows, [&](const DiffRow& row) { return shows_change(row, unit); });
  return shows_all ? unit : unit_for(largest_change);
}

void add_rows(std::string& text, const char* title, std::vector<DiffRow> rows, const Unit& unit, bool words) {
  std::erase_if(rows, [&](const DiffRow& row) { return !shows_change(row, unit); });
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

std::string to_text(const ReportDiff& diff, bool unicode, const std::string& before, const std::string& after) {
  const std::string names = before.empty() ? "" : fmt::format(": before {}, after {}", before, after);
  if (diff.is_empty()) return printable_lines(fmt::format("oomdiag: no difference{}\n", names), unicode);
  const std::vector<DiffRow> rows = all_rows(diff);
  const Unit unit = choose_unit(rows);
  std::string text = fmt::format("oomdiag: the reports differ{}\n", names);
  const std::string ended_before = ending(diff.outcome_before, diff.cause_before);
  const std::string ended_after = ending(diff.outcome_after, diff.cause_after);
  if (ended_before != ended_after) text += fmt::format("\n  {} before, {} after\n", ended_before, ended_after);
  add_rows(text, "in all", diff.figures, unit, true);
  add_rows(text, "by category", diff.categories, unit, true);
  add_rows(text, "by module", diff.modules, unit, false);
  add_rows(text, "by op", diff.ops, unit, false);
  add_rows(text, "by line", diff.lines, unit, false);
  const auto small = std::ranges::count_if(rows, [&](const DiffRow& row) { return !shows_change(row, unit); });
  if (small > 0)
    text += fmt::format("\n  {} of less than 0.01 {} left out: --json\n", counted(small, "change"), unit.name);
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
