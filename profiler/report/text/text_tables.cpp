#include "profiler/report/text/text_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

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
constexpr size_t kMaxRanks = 16;
constexpr int64_t kLeastShare = 20;  // less than this part of pinned host memory is not worth a row

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

std::string name_of(const ReportRank& rank) {
  return rank.rank ? fmt::format("rank {}", *rank.rank) : fmt::format("process {}", rank.pid);
}

std::string outcome_of(const ReportRank& rank) {
  if (rank.outcome == "out_of_memory" && rank.failure) {
    return "out of memory " + moment_text(rank.failure->phase, rank.failure->step);
  }
  return rank.outcome == "ok"       ? "ok"
         : rank.outcome == "killed" ? "killed, or exited without a report"
                                    : printable(rank.outcome, 40);
}

// A rank's helper that came to the GPU and took nothing of it does not.
bool says_something(const ReportRank& rank) {
  return rank.rank || rank.peak.reserved_bytes > 0 || rank.outcome != "ok";
}

// The last step and phase in which it allocated.
std::string reached_by(const ReportOfDevice& device) {
  if (device.failure) return fmt::format("out of memory in {}", name_of(device.failure->phase));
  if (device.phases.empty() || device.phases.back().phase == Phase::other) return "";
  return fmt::format("got as far as {}, step {}", name_of(device.phases.back().phase), device.phases.back().step);
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

std::string gpus_table(const Report& report) {
  if (report.devices.size() < 2 || !report.ranks.empty()) return {};
  int64_t largest = 0;
  for (const ReportOfDevice& device : report.devices) largest = std::max(largest, device.peak.reserved_bytes);
  const Unit unit = unit_for(largest);
  std::string text =
      "  " + padded(fmt::format("GPUs, {}", unit.name), 24) + fmt::format("{:>9}{:>11}\n", "peak", "reserved");
  for (const ReportOfDevice& device : report.devices) {
    text += fmt::format("    {:<22}{:>9}{:>11}   {}\n", fmt::format("GPU {}", device.device.index),
                        in_unit(device.peak.allocated_bytes, unit), in_unit(device.peak.reserved_bytes, unit),
                        reached_by(device));
  }
  return text;
}

std::string ranks_table(const Report& report) {
  std::vector<ReportRank> ranks;
  std::ranges::copy_if(report.ranks, std::back_inserter(ranks), says_something);
  if (ranks.size() < 2) return {};
  int64_t largest = 0;
  for (const ReportRank& rank : ranks) largest = std::max(largest, rank.peak.reserved_bytes);
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("processes, {}", unit.name), 24) +
                     fmt::format("{:>9}{:>11}   outcome\n", "peak", "reserved");
  for (size_t i = 0; i < std::min(ranks.size(), kMaxRanks); ++i) {
    const ReportRank& rank = ranks[i];
    text += fmt::format("    {:<22}{:>9}{:>11}   {}\n", name_of(rank), in_unit(rank.peak.allocated_bytes, unit),
                        in_unit(rank.peak.reserved_bytes, unit), outcome_of(rank));
  }
  if (ranks.size() > kMaxRanks) text += fmt::format("    {} more\n", ranks.size() - kMaxRanks);
  if (const auto& imbalance = report.imbalance) {
    text += fmt::format("    imbalance: rank {} peaks {} above the others, whose median is {}\n", imbalance->rank,
                        with_unit(imbalance->difference_bytes), with_unit(imbalance->median_of_others_bytes));
  }
  return text;
}

}  // namespace oomdiag
