#include "profiler/explain/fixes/fixes.h"

#include <algorithm>

namespace oomdiag {
namespace {

/// Of two fixes that are as good as each other the report has the first one here first.
std::vector<FixRow> join_tables() {
  std::vector<FixRow> rows;
  for (const std::span<const FixRow> table : {list_step_fixes(), list_state_fixes(), list_checkpoint_fixes(),
                                              list_language_fixes(), list_autocast_fixes(), list_batch_fixes()}) {
    rows.insert(rows.end(), table.begin(), table.end());
  }
  for (FixRow cure : list_cures()) {
    cure.cures_reason = true;
    rows.push_back(cure);
  }
  return rows;
}

/// "batch" of "batch_6012"; the text itself where no number ends it.
std::string_view without_number(std::string_view id) {
  const size_t digits = id.find_last_not_of("0123456789") + 1;
  const bool numbered = digits > 1 && digits < id.size() && id[digits - 1] == '_';
  return numbered ? id.substr(0, digits - 1) : id;
}

}  // namespace

std::span<const FixRow> list_fixes() {
  static const std::vector<FixRow> rows = join_tables();
  return rows;
}

const FixRow* find_fix(std::string_view id) {
  for (const std::string_view name : {id, without_number(id)}) {
    const auto row = std::ranges::find(list_fixes(), name, &FixRow::id);
    if (row != list_fixes().end()) return &*row;
  }
  return nullptr;
}

bool cures_reason(std::string_view id) {
  const FixRow* const row = find_fix(id);
  return row != nullptr && row->cures_reason;
}

bool is_run_as(std::string_view cure, std::string_view id) {
  const FixRow* const row = find_fix(cure);
  return row != nullptr && !row->has_module && !row->same_as.empty() && row->same_as == id;
}

std::vector<std::string> split_lines(std::string_view lines) {
  std::vector<std::string> list;
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    list.emplace_back(lines.substr(0, end));
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
  return list;
}

}  // namespace oomdiag
