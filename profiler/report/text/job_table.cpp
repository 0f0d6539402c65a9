#include "profiler/report/text/job_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/place_text.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxRanks = 16;

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
