#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "profiler/cost/metered_operator.h"
#include "profiler/cost/operator_work.h"
#include "profiler/cost/time_model.h"

namespace oomdiag {

/// The work of several calls, and the time that the model gives it.
struct WorkSum {
  int64_t flops = 0, memory_bytes = 0, bus_bytes = 0, launches = 0;
  double time_ns = 0;                       ///< of the GPU; 0 where the device is not known
  double host_ns = 0;                       ///< that the host takes to submit it
  int64_t collectives = 0, link_bytes = 0;  ///< calls of NCCL, and what they send to other ranks
  int64_t overlapped = 0;  ///< of the collectives, and copies on streams of their own: beside which the GPU computes
  double overlapped_ns = 0, waited_for_ns = 0;   ///< beside what is computed, and what computing waits for
  std::array<double, kBoundByCount> bound_ns{};  ///< of it, by BoundBy

  BoundBy bound_by() const;
};

/// What one step does.
struct StepWork {
  int64_t step = 0;  ///< counted from 1; 0: the program had no steps, and this is all that it did
  WorkSum all{};
  std::array<int64_t, kWorkPrecisions> flops{};  ///< by WorkPrecision
  double peak_compute_ns = 0;                    ///< what the FLOPs would take at the device's full rates
  int64_t not_metered = 0;                       ///< calls that compute products of which there is no rule
  bool has_time = false;                         ///< all rates that are needed are known
  std::map<std::string, WorkSum> phases{};
  std::map<uint32_t, WorkSum> modules{};  ///< by their index among the names of the trace; 0 = in none
  std::map<uint32_t, WorkSum>
      forward{};  ///< of them, what forward does; host_ns: what it takes to submit it again in backward

  /// Of the collectives and of copies on streams of their own, what no computation of their phase hides: what is waited for, one of the others (the first gather of a
  /// forward pass, the last reduction of a backward pass), and what takes longer than the phase.
  double exposed_communication_ns() const;
  double gpu_ns() const { return all.time_ns + exposed_communication_ns(); }

  /// The GPU works while the host submits what comes next: a step is the longer of the two.
  double step_ns() const { return std::max(gpu_ns(), all.host_ns); }
  BoundBy bound_by() const;
};

/// The last step that was over and is like most of them: without the evaluation that falls in some. None where the run has none:
/// it was metered without one that was complete, and `ended` is false.
/// `rates`: of the GPU that it ran on, null if they are not known.
std::optional<StepWork> work_of_last_step(const MeteredRun& run, const DeviceRates* rates, bool ended);

}  // namespace oomdiag
