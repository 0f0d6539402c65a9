#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/causes.h"
#include "profiler/explain/facts.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/growth.h"
#include "profiler/explain/owners.h"
#include "profiler/explain/reasons.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/history.h"

// The report: one value, whatever it is turned into. Names and meanings are those of its JSON, oomdiag-report/1 (fields.h).
// Bytes are integers, times nanoseconds; an empty string is null in JSON.
namespace oomdiag {

inline constexpr const char* kReportSchema = "oomdiag-report/1";

struct ReportDevice {
  int index = 0;
  std::string name;
  bool virtual_device = false;
  int64_t total_bytes = 0;
  std::string compute_capability;
  std::optional<int64_t> allowed_bytes{};  ///< of them, where the allocator's settings have a fraction

  double memory_fraction() const {
    return allowed_bytes && total_bytes > 0 ? static_cast<double>(*allowed_bytes) / static_cast<double>(total_bytes)
                                            : 1;
  }
  bool operator==(const ReportDevice&) const = default;
};

struct ReportPeak {
  int64_t allocated_bytes = 0, reserved_bytes = 0;
  Phase phase = Phase::setup;
  uint32_t step = 0;
  std::string node{}, op{}, module{}, source{};  ///< what allocated last before the peak
  std::string inner_source{};                    ///< line of a package inside of `source`, or empty
  std::string autocast{};                        ///< the dtype of the autocast region around it, or empty
  int64_t host_memory_bytes = 0;  ///< for which the GPU had no room: Windows' driver keeps them in host memory

  bool operator==(const ReportPeak&) const = default;
};

/// A failed allocation, and the state then.
struct ReportFailure {
  Phase phase = Phase::other;
  uint32_t step = 0;
  std::string node{}, op{}, module{}, source{};
  std::string inner_source{};  ///< line of a package inside of `source`, or empty
  std::string inner_op{};      ///< the operator inside of `op` (in backward: inside of `node`) that allocated
  int64_t requested_bytes = 0, allocated_bytes = 0, reserved_bytes = 0, free_bytes = 0;
  int64_t time_ns = 0;                      ///< since recording began
  std::string requested_for{};              ///< "gradient of relu3, [6720, 128, 16, 16] float32", or empty
  std::vector<std::string> stack{};         ///< calls that led to `source`, "train.py:31 in forward", innermost first
  std::vector<std::string> native_stack{};  ///< C++ calls, "train+0x4f1a in step(long)", where they were asked for
  std::string autocast{};                   ///< the dtype of the autocast region around the op, or empty
  std::string parameter_group{};            ///< that an optimizer's step was at, of several: "AdamW, group 1"

  bool operator==(const ReportFailure&) const = default;
};

/// Somebody who holds bytes.
struct ReportOwner {
  Category category = Category::unknown;
  int64_t bytes = 0;
  std::string name{};  ///< what it is called where it is made: a module, else an op
  std::string shape{};
  std::vector<std::string> used_by{};  ///< modules whose backward keeps it
  std::string autocast{};              ///< the dtype of the autocast region that it was made in, or empty
  std::string parameter_group{};       ///< "AdamW, group 1", of an optimizer with several

  bool operator==(const ReportOwner&) const = default;
};

/// What the stacks of a snapshot say of a category: so many bytes with this confidence.
struct ReportFromStacks {
  Category category = Category::unknown;
  std::string confidence{};  ///< high | medium | low
  int64_t bytes = 0;

  bool operator==(const ReportFromStacks&) const = default;
};

/// Those who hold bytes and are alike, as the same tensor of each layer: folded, "transformer.h.*.mlp.act".
struct ReportHolder {
  Category category = Category::unknown;
  std::string name{};                              ///< module or parameter; empty where no module ran
  std::string kind{};                              ///< what people call it: logits | loss | cast, or empty
  std::string op{}, source{}, shape{}, used_by{};  ///< empty where they differ
  std::string referrer{};                          ///< variable of the program; empty where they differ
  int64_t bytes = 0, blocks = 0;
  int64_t copies = 1;       ///< how many modules or parameters were folded
  int64_t block_bytes = 0;  ///< of each block, where they are equal

  bool operator==(const ReportHolder&) const = default;
};

struct ReportBlockedSegment {
  int64_t bytes = 0, largest_free_block_bytes = 0, used_bytes = 0;
  std::vector<ReportOwner> blocked_by{};

  bool operator==(const ReportBlockedSegment&) const = default;
};

struct ReportCause {
  CauseKind kind = CauseKind::capacity;
  std::string because{};  ///< which row of kCauses
  int64_t short_by_bytes = 0;
  FailureFacts evidence{};
  std::vector<ReportBlockedSegment> blocked_segments{};  ///< where free and cached bytes are enough
  std::vector<NonPytorchOwner> non_pytorch{};            ///< of non_pytorch

  bool operator==(const ReportCause&) const = default;
};

/// How the bytes of the GPU are spent at the described moment; adds up to the total.
struct ReportMemory {
  int64_t allocated_bytes = 0, pending_free_bytes = 0, cached_bytes = 0, non_pytorch_bytes = 0, free_bytes = 0;

  bool operator==(const ReportMemory&) const = default;
};

struct ReportSavedTensor {
  int64_t bytes = 0;
  std::vector<int64_t> shape{};
  std::string dtype{}, made_by{}, module{}, source{};
  std::vector<std::string> saved_by{}, saved_by_modules{};

  bool operator==(const ReportSavedTensor&) const = default;
};

/// A place that keeps more with each step.
struct ReportGrowingPlace {
  std::string op{}, module{}, source{};
  int64_t bytes_per_step = 0, live_bytes = 0, blocks = 0;

  bool operator==(const ReportGrowingPlace&) const = default;
};

/// Growth from step to step that has one reason.
struct ReportGrowth {
  GrowthKind kind = GrowthKind::kept_tensors;
  int64_t bytes_per_step = 0, grown_bytes = 0;
  uint32_t first_step = 0, last_step = 0;
  std::string op{}, module{}, source{};  ///< where the tensor is made that holds the rest
  std::string referrer{};                ///< variable of the program that keeps it, or empty
  int64_t place_count = 0;
  std::vector<ReportGrowingPlace> places{};

  bool operator==(const ReportGrowth&) const = default;
};

/// The life of the largest block in use.
struct ReportLifetime {
  Category category = Category::unknown;
  std::string name{}, shape{};
  int64_t bytes = 0;
  Phase made_in = Phase::setup;
  uint32_t made_in_step = 0;
  std::string op{}, module{}, source{};  ///< that made it
  Keeper kept_by = Keeper::program;
  std::string freed_by_node{}, freed_by_module{};

  bool operator==(const ReportLifetime&) const = default;
};

struct ReportPoint {
  int64_t time_ns = 0, allocated_bytes = 0, reserved_bytes = 0;

  bool operator==(const ReportPoint&) const = default;
};

/// OOMs that a library caught inside of an op, to go on with a slower plan.
struct ReportRecovered {
  std::string op;
  int64_t requested_bytes = 0, count = 0;
  int64_t granted_bytes = 0;  ///< the workspace of the plan that it went on with, 0 = one without
  std::string node{};         ///< in backward

  bool operator==(const ReportRecovered&) const = default;
};

/// What the parameters of one group of an optimizer take; without a name: what is in no group that is known.
struct ReportParameterGroup {
  std::string name{};
  int64_t parameter_bytes = 0, gradient_bytes = 0, optimizer_state_bytes = 0;

  bool operator==(const ReportParameterGroup&) const = default;
};

/// All that is said about one GPU.
struct ReportOfDevice {
  ReportDevice device{};
  ReportPeak peak{};
  std::optional<ReportFailure> failure{};
  std::optional<ReportCause> cause{};
  Figures categories{};
  std::vector<ReportFromStacks>
      from_stacks{};  ///< how far the categories of a snapshot can be trusted; adds up to them
  ReportMemory memory{};
  Figures private_pools{};  ///< of MemPools and CUDA graphs: reserved_bytes, and cached_bytes of GPU's
  std::vector<NonPytorchOwner> non_pytorch{};  ///< adds up to memory.non_pytorch_bytes; the last is "unexplained"
  std::vector<NonPytorchOwner> host_memory{};  ///< pinned and managed
  std::vector<PinnedHostMemory> pinned_host_memory{};  ///< of host_memory: at most 8 places
  std::vector<InitializationStep> initialization_steps{};
  std::vector<NonPytorchOwner> failed_driver_requests{};  ///< the largest failed request of each library to the driver
  Figures packing{};                                      ///< load ≤ pack ≤ reserved ≤ total
  Figures attribution{};
  int64_t headroom_bytes = 0;
  int64_t required_bytes = 0;  ///< the smallest GPU on which the described moment would pass, predicted
  int64_t replay_error_bytes = 0;
  std::vector<ReportGrowth> growth{};
  std::optional<uint32_t> out_of_memory_near_step{};  ///< of a run that fits and grows
  Owners allocated_by{};
  std::optional<ReportLifetime> largest_allocation{};
  Figures phase_peaks{};                        ///< of all steps, by phase
  std::vector<ReportOwner> allocations{};       ///< the largest blocks, at most 50
  std::vector<ReportHolder> top_allocations{};  ///< the same folded: at most 8 of a category
  std::optional<AutocastUse> autocast{};
  std::vector<ReportParameterGroup> parameter_groups{};  ///< of several groups; empty where there is one
  std::vector<ReportSavedTensor> saved_tensors{};
  std::optional<BatchModel> batch{};
  std::optional<Reason> reason{};
  std::vector<Fix> fixes{};
  std::optional<Advice> besides{};  ///< Findings::besides
  std::vector<PhasePeak> phases{};
  std::vector<ReportPoint> timeline{};
  std::vector<ReportRecovered> recovered_by_library{};
  std::vector<ReportFailure> caught{};  ///< the first 50
  int64_t caught_count = 0;
  bool caught_at_least = false;  ///< there may have been more, in events that were overwritten
  std::vector<Mark> marks{};

  bool operator==(const ReportOfDevice&) const = default;
};

/// One process of a job of several.
struct ReportRank {
  std::optional<int> rank{};  ///< none: a process beside the ranks
  int pid = 0;
  std::string outcome{};
  ReportDevice device{};
  ReportPeak peak{};
  std::optional<ReportFailure> failure{};
  std::optional<CauseKind> cause{};
  int64_t headroom_bytes = 0;
  std::string folder{};  ///< of its own report, inside of the run folder

  bool operator==(const ReportRank&) const = default;
};

/// A rank that needs clearly more than the others.
struct ReportImbalance {
  int rank = 0;
  int64_t peak_bytes = 0, median_of_others_bytes = 0, difference_bytes = 0;

  bool operator==(const ReportImbalance&) const = default;
};

/// What a run of a reference model shows about its case. The member of a report is not called `case`, its JSON name is.
struct ReportCase {
  std::string id;                    ///< "S10", or empty for a model without a case
  std::string about;                 ///< "training without zero_grad"
  std::vector<std::string> notes{};  ///< sentences, and tables whose lines begin with two spaces
  Figures figures{};                 ///< what they are made from

  bool operator==(const ReportCase&) const = default;
};

/// The work of a phase or a module in a step.
struct ReportWorkPart {
  std::string name{};
  int64_t flops = 0, memory_bytes = 0, bus_bytes = 0, launches = 0;
  std::optional<int64_t> time_ns{};  ///< modelled
  std::string bound_by{};            ///< what most of the time goes to

  bool operator==(const ReportWorkPart&) const = default;
};

/// What a complete step of a metered run does, and how long a model says that it takes on this device.
struct ReportWork {
  uint32_t step = 0;  ///< 0: the program had no steps, and this is all of it
  int64_t flops = 0;
  Figures flops_by_dtype{};
  int64_t memory_bytes = 0, bus_bytes = 0, launches = 0;
  int64_t not_metered = 0;                ///< calls that compute products of which there is no rule
  std::optional<int64_t> step_time_ns{};  ///< modelled
  std::optional<int64_t> step_time_low_ns{}, step_time_high_ns{};  ///< eight of ten steps lie between these
  std::optional<int64_t> host_time_ns{};                           ///< that the host takes to submit the step
  int64_t collectives = 0, link_bytes = 0;                         ///< calls of NCCL, and what they send to other ranks
  std::optional<int64_t> communication_time_ns{};                  ///< modelled: of all collectives
  std::optional<int64_t> exposed_communication_time_ns{};          ///< … of that, what no computation hides
  std::string bound_by{};                        ///< compute, memory bandwidth, bus, launches, host, communication
  std::optional<int64_t> utilization_percent{};  ///< FLOPs of the step time, of those at the device's full rates
  std::string why_no_time{};                     ///< where there is no step time
  std::vector<ReportWorkPart> phases{}, modules{};

  bool operator==(const ReportWork&) const = default;
};

struct Report {
  std::string outcome = "ok";  ///< ok | out_of_memory | caught (it went on after OOMs) | killed | failed
  std::optional<int> exit_code{};
  std::string torch{};
  std::string command{};
  std::string folder{};   ///< where it is kept, for the next command to type; not in the JSON
  bool snapshot = false;  ///< of a memory snapshot: no phases, no steps; not in the JSON
  int rank = 0, world_size = 1;
  uint32_t steps = 0;
  uint32_t steady_steps =
      0;  ///< of those: ops were not watched, as each repeated the steps before to the last allocation
  bool still_runs = false;                ///< the report is of what happened so far
  bool lower_bound = false;               ///< sizes hung on values that a virtual GPU does not compute
  bool unwatched = false;                 ///< the allocator reported nothing: at best its totals are known
  std::vector<ReportOfDevice> devices{};  ///< those that were used, by index
  size_t main_device = 0;                 ///< of `devices`: the one that failed, else the fullest
  std::vector<ReportRank> ranks{};        ///< the processes of a job of several, else empty
  std::optional<ReportImbalance> imbalance{};
  std::vector<std::string> limitations{};
  std::vector<RecorderNote> notes{};  ///< what the recorder and the virtual device had to say, word for word
  std::optional<ReportCase> reference_case{};
  std::optional<ReportWork> work{};  ///< of a metered run

  bool operator==(const Report&) const = default;
};

/// What the first screen says besides its reason, or null.
inline const Reason* second_reason_of(const ReportOfDevice& device) {
  const bool is_another = device.besides && device.reason && device.besides->reason != *device.reason;
  return is_another ? &device.besides->reason : nullptr;
}

/// Whether the first screen has a line of the weights that autocast has cast.
inline bool keeps_casts(const ReportOfDevice& device) { return device.autocast && device.autocast->cache_bytes > 0; }

/// What a GPU's growing places take together in each step.
inline int64_t growth_of(const ReportOfDevice& device) {
  int64_t bytes = 0;
  for (const ReportGrowth& growth : device.growth) bytes += growth.bytes_per_step;
  return bytes;
}

/// What PyTorch may take of the GPU.
inline int64_t available_bytes(const ReportOfDevice& device) {
  const int64_t total = device.device.total_bytes;
  return std::min(total - device.memory.non_pytorch_bytes, device.device.allowed_bytes.value_or(total));
}

/// The device that the report is about: the one that failed, else the fullest; nullptr where none was used.
inline const ReportOfDevice* main_device_of(const Report& report) {
  return report.main_device < report.devices.size() ? &report.devices[report.main_device] : nullptr;
}
inline ReportOfDevice* main_device_of(Report& report) {
  return report.main_device < report.devices.size() ? &report.devices[report.main_device] : nullptr;
}

}  // namespace oomdiag
