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
  int64_t nvlink_bytes = 0;  ///< in each direction; 0: such GPUs have no NVLink
  int multiprocessors = 0;
  int capability_major = 0;  ///< of the compute capability: 9 = Hopper
};

/// What one call takes at full rates. Products are cut into tiles that fill the multiprocessors in waves, of which the last is as long as
/// the others.
struct PeakTime {
  double compute_ns = 0, memory_ns = 0, bus_ns = 0;
  double channel_ns = 0;  ///< of kernels with a thread block for each channel, at one element in each nanosecond
};

/// Kernels that have a coefficient of their own, of `channel_ns`, or of `compute_ns` beside that of their kind.
enum class KernelFamily {
  usual,
  batch_norm,
  batch_norm_backward,
  cudnn_batch_norm,
  cudnn_batch_norm_backward,
  depthwise_fp32_backward,  ///< PyTorch's own: its gradient of the weights reads all of the input for each element of the window
  hopper_half_product,      ///< cuBLAS has kernels for Hopper's tensor cores
  hopper_tf32_convolution,  ///< cuDNN mostly takes kernels written for Ampere's, which reach part of the rate
  hopper_half_convolution,
  hopper_half_attention,
  fp32_attention,  ///< the memory-efficient kernel, without tensor cores
  fp32_attention_backward
};
inline constexpr size_t kKernelFamilies = 12;
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

/// What the host takes to submit one call in a phase of a step, with the Python around it, autograd and the driver: on the host of the
/// measured trainings (docs/cost.md). In the optimizer it is by the tensors of lists.
double host_ns(std::string_view phase, const OperatorWork& work);

/// Of ten published steps that were not fitted, eight took between these shares of the modelled time.
struct ErrorOfModel {
  double low = 1, high = 1;
};
ErrorOfModel error_of_model();

}  // namespace oomdiag
