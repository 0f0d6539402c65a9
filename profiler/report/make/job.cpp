#include "profiler/report/make/job.h"

#include <algorithm>

#include "profiler/explain/facts/imbalance.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/words/cause_text.h"

namespace oomdiag {
namespace {

constexpr int64_t kLeastImbalance = int64_t{64} << 20;

int64_t peak_of(const JobMember& member) {
  const ReportOfDevice* device = main_device_of(member.report);
  return device == nullptr ? 0 : device->peak.allocated_bytes;
}

/// Of several processes with one rank's number (a rank's helpers have its environment) the fullest is the rank.
bool is_rank(const JobMember& member, const std::vector<JobMember>& members) {
  if (member.report.world_size <= 1) return false;
  return std::ranges::none_of(members, [&](const JobMember& other) {
    if (&other == &member || other.report.world_size <= 1 || other.report.rank != member.report.rank) return false;
    return peak_of(other) != peak_of(member) ? peak_of(other) > peak_of(member) : &other < &member;
  });
}

/// When it failed, on the clock that all share; the end of time if it did not.
uint64_t failure_time(const JobMember& member) {
  const ReportOfDevice* device = main_device_of(member.report);
  if (device == nullptr || !device->failure) return ~uint64_t{0};
  return member.start_time_ns + static_cast<uint64_t>(device->failure->time_ns);
}

/// Reserved bytes as a part of the GPU, in millionths: ranks may have different GPUs.
int64_t fullness(const JobMember& member) {
  const ReportOfDevice* device = main_device_of(member.report);
  if (device == nullptr || device->device.total_bytes == 0) return -1;
  constexpr double kMillion = 1e6;
  return static_cast<int64_t>(kMillion * static_cast<double>(device->peak.reserved_bytes) /
                              static_cast<double>(device->device.total_bytes));
}

const JobMember& find_main(const std::vector<JobMember>& members) {
  const auto before = [](const JobMember& a, const JobMember& b) {
    const uint64_t time_a = failure_time(a), time_b = failure_time(b);
    return time_a != time_b ? time_a < time_b : fullness(a) > fullness(b);
  };
  return *std::min_element(members.begin(), members.end(), before);
}

ReportRank describe(const JobMember& member, const std::vector<JobMember>& members) {
  ReportRank rank{.pid = member.pid, .outcome = member.report.outcome, .folder = member.folder};
  if (is_rank(member, members)) rank.rank = member.report.rank;
  if (const ReportOfDevice* device = main_device_of(member.report)) {
    rank.device = device->device;
    rank.peak = device->peak;
    rank.failure = device->failure;
    if (device->cause) rank.cause = device->cause->kind;
    rank.headroom_bytes = device->headroom_bytes;
  }
  return rank;
}

int64_t median(std::vector<int64_t> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The rank that needs most, if it needs clearly more than the others do.
std::optional<ReportImbalance> find_uneven_rank(const std::vector<ReportRank>& ranks) {
  const ReportRank* highest = nullptr;
  for (const ReportRank& rank : ranks) {
    if (!rank.rank) continue;
    if (highest == nullptr || rank.peak.allocated_bytes > highest->peak.allocated_bytes) highest = &rank;
  }
  std::vector<int64_t> others;
  for (const ReportRank& rank : ranks) {
    if (rank.rank && &rank != highest) others.push_back(rank.peak.allocated_bytes);
  }
  if (others.empty()) return std::nullopt;
  const int64_t usual = median(std::move(others));
  const int64_t more = highest->peak.allocated_bytes - usual;
  if (more < std::max(kLeastImbalance, highest->peak.allocated_bytes / 20)) return std::nullopt;
  return ReportImbalance{*highest->rank, highest->peak.allocated_bytes, usual, more};
}

/// Whether a rank has come as far as the one that failed: before that its peak says nothing about its share.
bool came_as_far(const ReportOfDevice& device, const ReportFailure& failure) {
  const auto order = [](Phase phase) {
    return phase == Phase::other ? Phase::forward : phase;
  };  // setup < … < optimizer
  return std::any_of(device.phases.begin(), device.phases.end(), [&](const PhasePeak& phase) {
    return phase.step != failure.step ? phase.step > failure.step : order(phase.phase) >= order(failure.phase);
  });
}

/// Adds to the rank that failed how unevenly the work is shared. Each rank is taken to have a device of its own.
void add_imbalance(const std::vector<JobMember>& members, const JobMember& failed, Report& job) {
  const ReportOfDevice* device = main_device_of(job);
  if (!is_rank(failed, members) || device == nullptr || !device->failure || !device->cause) return;
  std::vector<int64_t> peaks;
  size_t at = 0;
  for (const JobMember& member : members) {
    const ReportOfDevice* other = main_device_of(member.report);
    if (!is_rank(member, members) || other == nullptr) continue;
    if (&member == &failed) at = peaks.size();
    if (&member == &failed || came_as_far(*other, *device->failure)) peaks.push_back(other->peak.allocated_bytes);
  }
  const int64_t available = device->memory.allocated_bytes + device->memory.pending_free_bytes +
                            device->memory.cached_bytes + device->memory.free_bytes;
  const auto found = find_imbalance(peaks, at, device->failure->requested_bytes, available);
  if (!found) return;
  ReportCause& cause = *job.devices[job.main_device].cause;
  cause.evidence.imbalance = found;
  decide_again(cause);
}

std::string find_outcome(const Report& main, const std::vector<JobMember>& members, std::optional<int> exit_code) {
  if (main.outcome == "out_of_memory" || !exit_code) return main.outcome;
  const bool caught = std::ranges::any_of(members, [](const JobMember& one) { return one.report.outcome == "caught"; });
  return *exit_code == 0 ? (caught ? "caught" : "ok") : *exit_code > 128 ? "killed" : "failed";
}

}  // namespace

Report merge_job(const std::vector<JobMember>& members, std::optional<int> exit_code) {
  const JobMember& main = find_main(members);
  Report job = main.report;
  job.outcome = find_outcome(job, members, exit_code);
  job.exit_code = exit_code;
  add_imbalance(members, main, job);
  for (const JobMember& member : members) {
    job.ranks.push_back(describe(member, members));
    const ReportOfDevice* device = main_device_of(job);
    if (&member == &main && device != nullptr && device->cause) job.ranks.back().cause = device->cause->kind;
  }
  const auto by_rank = [](const ReportRank& a, const ReportRank& b) {
    if (a.rank.has_value() != b.rank.has_value()) return a.rank.has_value();
    return a.rank != b.rank ? a.rank < b.rank : a.pid < b.pid;
  };
  std::stable_sort(job.ranks.begin(), job.ranks.end(), by_rank);
  job.imbalance = find_uneven_rank(job.ranks);
  return job;
}

}  // namespace oomdiag
