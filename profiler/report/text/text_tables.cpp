#include "profiler/report/text/text_tables.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/place_text.h"
#include "profiler/report/words/printable.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {
namespace {

constexpr size_t kGrowthColumns = 48;  // before its figures
constexpr size_t kMaxColumns = 90;     // of a line of its own
constexpr int64_t kLeastShare = 20;    // less than this part of pinned host memory is not worth a row

// "relu1  [6800, 32, 64, 64]": who made it, what it is.
std::string label_of(const ReportOwner& owner) {
  return printable(owner.name.empty() ? "?" : owner.name, 40) +
         (owner.shape.empty() ? "" : "  " + printable(owner.shape, 40));
}

// "aten::_pin_memory  train.py:31": what asked for it, and where.
std::string place_of(const PinnedHostMemory& place) {
  const std::string& by = place.op.empty() ? place.owner : place.op;
  const std::string& line = place.source.empty() ? place.inner_source : place.source;
  return printable(by, 30) + (line.empty() ? "" : "  " + printable(short_source(line), 24));
}

}  // namespace

std::string free_blocks_table(const ReportOfDevice& device) {
  if (!device.cause || device.cause->kind != CauseKind::fragmentation || device.cause->blocked_segments.empty())
    return {};
  int64_t largest = 0;
  for (const ReportBlockedSegment& segment : device.cause->blocked_segments) largest = std::max(largest, segment.bytes);
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("largest free blocks, {}", unit.name), 24) +
                     fmt::format("{:>9}{:>9}   blocked by\n", "free", "segment");
  for (const ReportBlockedSegment& segment : device.cause->blocked_segments) {
    if (reads_as_zero(segment.largest_free_block_bytes, unit)) continue;
    const std::string by = segment.blocked_by.empty() ? "" : label_of(segment.blocked_by.front());
    text += fmt::format("    {:22}{:>9}{:>9}   {}\n", "", in_unit(segment.largest_free_block_bytes, unit),
                        in_unit(segment.bytes, unit), by);
  }
  return text;
}

std::string pinned_host_memory_table(const ReportOfDevice& device) {
  constexpr int64_t kLeast = int64_t{1} << 30;
  int64_t all = 0;
  for (const PinnedHostMemory& place : device.pinned_host_memory) all += place.bytes;
  if (all < kLeast) return {};
  const Unit unit = unit_for(all);
  std::string text = "  " + padded("pinned host memory", 58) + fmt::format("{:>13}\n", unit.name);
  for (const PinnedHostMemory& place : device.pinned_host_memory) {
    if (place.bytes * kLeastShare < all) break;
    text += "    " + padded(place_of(place), 56) + fmt::format("{:>13}\n", in_unit(place.bytes, unit));
  }
  return text;
}

std::string groups_table(const ReportOfDevice& device) {
  constexpr size_t kMaxGroups = 8;
  if (device.parameter_groups.empty()) return {};
  int64_t largest = 0;
  for (const ReportParameterGroup& group : device.parameter_groups) {
    largest = std::max({largest, group.parameter_bytes, group.gradient_bytes, group.optimizer_state_bytes});
  }
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("by parameter group, {}", unit.name), 30) +
                     fmt::format("{:>11}{:>11}{:>17}\n", "parameters", "gradients", "optimizer state");
  for (size_t i = 0; i < std::min(device.parameter_groups.size(), kMaxGroups); ++i) {
    const ReportParameterGroup& group = device.parameter_groups[i];
    const std::string name = group.name.empty() ? "in no group that is known" : printable(group.name, 27);
    text += "    " + padded(name, 28) +
            fmt::format("{:>11}{:>11}{:>17}\n", in_unit(group.parameter_bytes, unit),
                        in_unit(group.gradient_bytes, unit), in_unit(group.optimizer_state_bytes, unit));
  }
  if (device.parameter_groups.size() > kMaxGroups) {
    text += fmt::format("    {} more\n", device.parameter_groups.size() - kMaxGroups);
  }
  return text;
}

std::string growth_table(const ReportOfDevice& device, const TextOptions& options) {
  if (device.growth.empty()) return {};
  constexpr size_t kMaxRows = 3;
  std::string text = "  " + padded("growing from step to step", kGrowthColumns - 2) +
                     fmt::format("{:>12}{:>12}\n", "per step", "so far");
  for (size_t i = 0; i < device.growth.size() && i < kMaxRows; ++i) {
    const ReportGrowth& growth = device.growth[i];
    const std::string label = in_words(std::string(name_of(growth.kind)));
    const std::string place =
        joined_by_arrows({growth.op, growth.module, short_source(growth.source)}, options.unicode);
    const std::string both = joined_by_arrows({label, place}, options.unicode);
    const bool in_one_line = count_columns(printable(both, kMaxColumns)) <= kGrowthColumns - 5;
    text += "    " + padded(printable(in_one_line ? both : label, kGrowthColumns - 5), kGrowthColumns - 4) +
            fmt::format("{:>12}{:>12}\n", with_unit(growth.bytes_per_step), with_unit(growth.grown_bytes));
    if (!in_one_line) text += "      " + printable(place, kMaxColumns) + "\n";
  }
  return text;
}

std::string marks_table(const ReportOfDevice& device) {
  constexpr size_t kMaxMarks = 12;
  if (device.marks.empty()) return {};
  int64_t largest = 0;
  for (const Mark& mark : device.marks) largest = std::max(largest, mark.peak_allocated_bytes);
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("marks, {}", unit.name), 36) +
                     fmt::format("{:>6}{:>12}{:>21}\n", "step", "allocated", "peak since the last");
  for (size_t i = 0; i < std::min(device.marks.size(), kMaxMarks); ++i) {
    const Mark& mark = device.marks[i];
    text += "    " + padded(printable(mark.name, 33), 34) +
            fmt::format("{:>6}{:>12}{:>21}\n", mark.step, in_unit(mark.allocated_bytes, unit),
                        in_unit(mark.peak_allocated_bytes, unit));
  }
  if (device.marks.size() > kMaxMarks) text += fmt::format("    {} more\n", device.marks.size() - kMaxMarks);
  return text;
}

}  // namespace oomdiag
