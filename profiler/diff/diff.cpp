#include "profiler/diff/diff.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "profiler/explain/facts/owners.h"
#include "profiler/fold_indices.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

using Sums = std::map<std::string, DiffRow>;

constexpr size_t kMaxRows = 20;
constexpr double kReservedNoise = 0.015;  // between address layouts of one program; see snapshot/compare.h

std::string file_of(const std::string& line) { return line.substr(0, line.rfind(':')); }

// The same project may lie in two folders.
std::string line_in_folder(const std::string& line) {
  const size_t last = line.rfind('/');
  const size_t before = last == line.npos || last == 0 ? line.npos : line.rfind('/', last - 1);
  return before == line.npos ? line : line.substr(before + 1);
}

// The last entry of a list that was cut off sums up the rest.
bool is_cut_off(const std::vector<OwnedBytes>& list) {
  return list.size() == kMaxOwned && list.back().name == "others";
}

std::span<const OwnedBytes> listed(const std::vector<OwnedBytes>& list) {
  return std::span(list).first(list.size() - (is_cut_off(list) ? 1 : 0));
}

/// The most that a name which is not in the list may hold.
int64_t most_of_unlisted(const std::vector<OwnedBytes>& list) {
  return is_cut_off(list) ? listed(list).back().bytes : 0;
}

template <class Rename>
Sums join(const std::vector<OwnedBytes>& before, const std::vector<OwnedBytes>& after, const Rename& rename) {
  struct Sides {
    std::optional<int64_t> before, after;
  };
  std::map<std::string, Sides> by_name;
  const auto add = [](std::optional<int64_t>& sum, int64_t bytes) { sum = sum.value_or(0) + bytes; };
  for (const OwnedBytes& one : listed(before)) add(by_name[rename(one.name)].before, one.bytes);
  for (const OwnedBytes& one : listed(after)) add(by_name[rename(one.name)].after, one.bytes);
  const int64_t most_before = most_of_unlisted(before), most_after = most_of_unlisted(after);
  Sums sums;
  for (const auto& [name, sides] : by_name) {
    sums[name] = {.name = {},
                  .before = sides.before ? *sides.before : std::min(most_before, *sides.after),
                  .after = sides.after ? *sides.after : std::min(most_after, *sides.before),
                  .at_least = (!sides.before && most_before > 0) || (!sides.after && most_after > 0)};
  }
  return sums;
}

// Only now that each has its other side: of the layers of one model some are listed and others not.
Sums fold_layers(const Sums& modules) {
  Sums folded;
  for (const auto& [name, row] : modules) {
    DiffRow& sum = folded[fold_indices(name)];
    sum.before += row.before;
    sum.after += row.after;
    sum.at_least = sum.at_least || row.at_least;
  }
  return folded;
}

// Code above a line moves it: rows of one file that make up for each other are the same line.
void drop_moved(std::vector<DiffRow>& rows, int64_t least) {
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = i + 1; j < rows.size(); ++j) {
      const bool gone = rows[i].before == 0 || rows[i].after == 0;
      const bool moved = gone && file_of(rows[i].name) == file_of(rows[j].name) &&
                         (rows[i].before == 0 ? rows[j].after : rows[j].before) == 0 &&
                         std::abs(rows[i].change() + rows[j].change()) < least;
      if (!moved) continue;
      rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(j));
      rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(i--));
      break;
    }
  }
}

// A module holds what the modules in it hold: of those with the same change the innermost says most.
void drop_outer(std::vector<DiffRow>& rows) {
  std::erase_if(rows, [&](const DiffRow& outer) {
    return std::ranges::any_of(rows, [&](const DiffRow& inner) {
      return inner.change() == outer.change() && inner.name.starts_with(outer.name + ".");
    });
  });
}

std::vector<DiffRow> changes(const Sums& sums, int64_t least) {
  std::vector<DiffRow> rows;
  for (const auto& [name, row] : sums) {
    if (std::abs(row.change()) < least) continue;
    rows.push_back(row);
    rows.back().name = name;
  }
  std::ranges::stable_sort(rows, std::greater{}, [](const DiffRow& row) { return std::abs(row.change()); });
  return rows;
}

std::vector<DiffRow> first_of(std::vector<DiffRow> rows) {
  if (rows.size() > kMaxRows) rows.resize(kMaxRows);
  return rows;
}

ReportOfDevice main_of(const Report& report) {
  const ReportOfDevice* const device = main_device_of(report);
  return device != nullptr ? *device : ReportOfDevice{};
}

}  // namespace

ReportDiff diff(const Report& before, const Report& after, const DiffOptions& options) {
  const ReportOfDevice a = main_of(before), b = main_of(after);
  ReportDiff result{.outcome_before = before.outcome, .outcome_after = after.outcome};
  if (a.cause) result.cause_before = a.cause->kind;
  if (b.cause) result.cause_after = b.cause->kind;
  const int64_t allocated = std::max(a.peak.allocated_bytes, b.peak.allocated_bytes);
  const auto least = std::max<int64_t>({1, options.least_bytes, allocated / 1000});
  const auto figure = [&](const char* name, int64_t was, int64_t is, int64_t noise) {
    if (std::abs(is - was) >= noise) result.figures.push_back({name, was, is});
  };
  figure("peak allocated", a.peak.allocated_bytes, b.peak.allocated_bytes, least);
  const auto reserved = static_cast<double>(std::max(a.peak.reserved_bytes, b.peak.reserved_bytes));
  figure("peak reserved", a.peak.reserved_bytes, b.peak.reserved_bytes,
         std::max(least, static_cast<int64_t>(reserved * kReservedNoise)));
  figure("growth per step", growth_of(a), growth_of(b), std::max<int64_t>(1, options.least_bytes));

  Sums categories;
  for (const auto& [name, bytes] : a.categories) categories[name].before = bytes;
  for (const auto& [name, bytes] : b.categories) categories[name].after = bytes;
  result.categories = first_of(changes(categories, least));
  auto modules = changes(fold_layers(join(a.allocated_by.module, b.allocated_by.module, std::identity{})), least);
  drop_outer(modules);
  result.modules = first_of(std::move(modules));
  result.ops = first_of(changes(join(a.allocated_by.op, b.allocated_by.op, std::identity{}), least));
  auto lines = changes(join(a.allocated_by.line, b.allocated_by.line, line_in_folder), least);
  drop_moved(lines, least);
  result.lines = first_of(std::move(lines));
  return result;
}

}  // namespace oomdiag
