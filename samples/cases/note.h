#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "samples/cases/case_run.h"

namespace oomdiag {

/// A figure of a run and the name of its column: {"peak", peak_of}.
struct Column {
  std::string name;
  std::function<int64_t(const CaseRun&)> bytes_of;
};

/// Writes what is said about a case, with the figures that it is made from.
class Note {
 public:
  Note(std::string_view id, std::string_view about) : case_{.id = std::string(id), .about = std::string(about)} {}

  void say(std::string sentence) { case_.notes.push_back(std::move(sentence)); }
  void figure(std::string name, int64_t value) { case_.figures.emplace_back(std::move(name), value); }
  /// A table of rows with a label, one unit for all its bytes; -1 is left empty.
  void table(std::string_view heading, const std::vector<std::string>& columns,
             const std::vector<std::pair<std::string, std::vector<int64_t>>>& rows);
  /// A table with a row for each run, and a figure "variant.peak_bytes" for each cell.
  void compare(std::span<const CaseRun> runs, const std::vector<Column>& columns);

  ReportCase finish() { return std::move(case_); }

 private:
  ReportCase case_;
};

}  // namespace oomdiag
