#include <algorithm>
#include <iterator>

#include "cli/experiments/fix.h"
#include "profiler/explain/causes/causes.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"

// What a report offers and no run was made of: `fix` says why, and gives the lines all the same.

namespace oomdiag {
namespace {

constexpr const char* kNoCure = "not run: in a leak only what stops the growth is a fix";

// Each run of a leak is as long as that which ran out, and shows of most changes only that it grows all the same.
bool is_no_cure_of_leak(const std::string& id, const Before& before) {
  const FixRow* const row = find_fix(id);
  const bool leaks = before.grows && before.cause == name_of(CauseKind::leak);
  return leaks && row != nullptr && !row->cures_reason && !row->cures_growth;
}

std::vector<std::string> ids_of(const MeasuredFix& fix) {
  std::vector<std::string> ids;
  std::ranges::transform(fix.changes, std::back_inserter(ids), &Change::id);
  return ids;
}

/// Whether they are the same fix: by their row, by one that stands for the other, or with another number.
bool is_same_fix(const std::string& offered, const std::string& tried) {
  const FixRow *const a = find_fix(offered), *const b = find_fix(tried);
  return offered == tried || (a != nullptr && a == b) || is_run_as(offered, tried);
}

bool was_tried(const Fix& offered, const std::vector<MeasuredFix>& tried) {
  return std::ranges::any_of(tried, [&](const MeasuredFix& one) {
    if (!offered.ids.empty()) return ids_of(one) == offered.ids;
    return one.changes.size() == 1 && is_same_fix(offered.id, one.changes.front().id);
  });
}

std::string why_offered_was_not_run(const Fix& offered, const std::vector<MeasuredFix>& tried) {
  if (!offered.ids.empty()) return "not run: its parts were looked at alone";
  const FixRow* const row = find_fix(offered.id);
  if (row == nullptr) return "not run";
  if (row->has_module) return "not run: nothing that it could change was seen in the program";
  const bool is_of_batch = row->group == change_of("half_batch").group;
  const bool has_sizes = std::ranges::any_of(
      tried, [](const MeasuredFix& one) { return one.changes.size() == 1 && one.changes.front().changes_batch(); });
  if (is_of_batch && !has_sizes) return "not run: name the batch size, oomdiag fix --batch N -- PROGRAM with {batch}";
  if (is_of_batch) return "not run: other sizes of the batch were";
  return "not run: nothing applies it to a program as it is, its lines have to be written";
}

}  // namespace

std::string why_not_run(const Change& change, const Before& before) {
  if (!change.missing.empty()) return change.missing;
  return is_no_cure_of_leak(change.id, before) ? kNoCure : "";
}

std::vector<MeasuredFix> list_not_run(const std::vector<Fix>& offered, const std::vector<MeasuredFix>& tried,
                                      const Before& before) {
  std::vector<MeasuredFix> list;
  for (const Fix& fix : offered) {
    const bool is_known = was_tried(fix, tried) || was_tried(fix, list);
    const std::vector<std::string> ids = fix.ids.empty() ? std::vector{fix.id} : fix.ids;
    if (is_known || std::ranges::any_of(ids, [](const std::string& id) { return find_fix(id) == nullptr; })) continue;
    MeasuredFix one{.changes = {}, .unproved = why_offered_was_not_run(fix, tried), .lines = fix.how};
    const bool is_no_cure = std::ranges::all_of(ids, [&](const auto& id) { return is_no_cure_of_leak(id, before); });
    if (is_no_cure) one.unproved = kNoCure, one.lines.clear();
    std::ranges::transform(ids, std::back_inserter(one.changes), change_of);
    if (one.changes.size() == 1) {
      one.changes.front().label = fix.label;
      take_prediction(one.changes.front(), fix);
    }
    list.push_back(std::move(one));
  }
  return list;
}

}  // namespace oomdiag
