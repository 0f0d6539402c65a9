#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "profiler/cost/operator_work.h"

// How long an operator takes on a GPU: the time at the GPU's full rates, over the efficiency of its kind of kernel, which was fitted to
// published measurements (scripts/fit_time_model, docs/cost.md).
namespace oomdiag {

/// What a GPU can do at most in a second; 0 = not known.
struct DeviceRates {
  std::array<int64_t, kWorkPrecisions> flops{};  ///< of dense products, by WorkPrecision
  int64_t tf32_flops = 0;  ///< convolutions and RNNs of float32 run in TF32 by default, products do not
  int64_t memory_bytes = 0;
  int64_t bus_bytes = 0;
  int64_t nvlink_bytes = 0;          ///< in each direction; 0: such GPUs have no NVLink
  int64_t host_ns_per_operator = 0;  ///< of the host, in forward; 0: what hosts usually take
  int multiprocessors = 0;
  int capability_major = 0;  ///< of the compute capability: 9 = Hopper
};

/// What one call takes at full rates. Products are cut into tiles that fill the multiprocessors in waves, of which the last is as long as
/// the others.
struct PeakTime {
  double compute_ns = 0, memory_ns = 0, bus_ns = 0;
  double turns_ns =
      0;  ///< of what thread blocks take one after the other, if each multiprocessor takes one in each nanosecond
};

/// Kernels that have coefficients of their own (time_coefficients.h).
enum class KernelFamily {
#define OOMDIAG_FAMILY(name, form) name,
#include "profiler/cost/kernel_families.h"
#undef OOMDIAG_FAMILY
};
std::string_view name_of(KernelFamily family);
KernelFamily family_of(const OperatorWork& work, const DeviceRates& rates);

/// None where a rate that it needs is not known.
std::optional<PeakTime> peak_time(const OperatorWork& work, const DeviceRates& rates);

enum class BoundBy { compute, memory, bus, launches, host, communication };
inline constexpr size_t kBoundByCount = 6;
std::string_view name_of(BoundBy bound);

/// The modelled time of one call, and what most of it goes to.
struct ModelledTime {
  double ns = 0;
  BoundBy bound_by = BoundBy::launches;
};

/// None where a rate that it needs is not known.
std::optional<ModelledTime> modelled_time(const OperatorWork& work, const DeviceRates& rates);

/// What the FLOPs of one call take at the device's full rates, without waves; 0 where the rate is not known.
double full_rate_ns(const OperatorWork& work, const DeviceRates& rates);

/// What the host takes to submit one call in a phase of a step, with the Python around it, autograd and the driver: on a usual host, or on
/// that of the device. In the optimizer it is by the tensors of lists.
double host_ns(std::string_view phase, const OperatorWork& work, const DeviceRates& rates);

/// Of ten published steps that were not fitted, eight took between these shares of the modelled time.
struct ErrorOfModel {
  double low = 1, high = 1;
};
ErrorOfModel error_of_model();

}  // namespace oomdiag
