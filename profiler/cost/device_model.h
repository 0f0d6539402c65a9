#pragma once

#include <array>
#include <cstdint>

#include "profiler/cost/operator_work.h"

// The least time that work takes on a GPU.
namespace oomdiag {

/// What decides about a GPU's throughput, as its card file has it.
struct DeviceFacts {
  int compute_major = 0, compute_minor = 0;
  int multiprocessors = 0;
  int64_t clock_khz = 0, memory_clock_khz = 0, memory_bus_bits = 0;
  bool is_geforce_rtx = false;  ///< of which those up to Ada add up in fp32 at half of the rate of their tensor cores
};

struct DeviceRates {
  std::array<double, kWorkPrecisions> flops_per_second{};  ///< by WorkPrecision, dense, at the boost clock
  double bytes_per_second = 0;
};

/// Rates that follow from the architecture: operations per clock and multiprocessor. All are 0 for an architecture that is not known.
DeviceRates derive_rates(const DeviceFacts& device);

enum class BoundBy { compute, memory, launches };

struct LeastTime {
  int64_t ns = 0;
  BoundBy bound_by = BoundBy::launches;
};

/// What the work of these calls takes at the full rates: the longest of computing, moving bytes and launching. A lower bound: no
/// kernel reaches them. 0 where a rate that is needed is not known.
LeastTime least_time(const Work& work, const DeviceRates& rates);

}  // namespace oomdiag
