#include "profiler/cost/time_model.h"

#include <algorithm>
#include <iterator>

#include "profiler/cost/operator_work.h"
#include "profiler/cost/products.h"
#include "profiler/cost/time_coefficients.h"

namespace oomdiag {
namespace {

/// A tile of a product, and how much of the peak rate its inner loop reaches against the largest one: a smaller tile loads more for each
/// multiplication.
struct Tile {
  int64_t m, n;
  double efficiency;
};
constexpr Tile kTiles[] = {{256, 128, 1}, {128, 128, 0.95}, {128, 64, 0.8}, {64, 64, 0.65},
                           {64, 32, 0.5}, {128, 32, 0.55},  {32, 32, 0.35}};

constexpr int64_t kLeastOfSplit = 512;  ///< of the inner dimension, that each part of a split product has

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// FLOPs that the multiprocessors could have done in the time in which they do this product. A product with few tiles and a long inner
/// dimension is split along it.
double flops_with_tile(const MatrixProduct& product, const Tile& tile, int64_t multiprocessors) {
  const int64_t tiles = product.batch * divide_up(product.m, tile.m) * divide_up(product.n, tile.n);
  const int64_t splits = std::clamp<int64_t>(multiprocessors / std::max<int64_t>(tiles, 1), 1,
                                             std::max<int64_t>(1, product.k / kLeastOfSplit));
  const int64_t inner = divide_up(divide_up(product.k, splits), 32) * 32;
  const int64_t waves = divide_up(tiles * splits, multiprocessors);
  return 2.0 * static_cast<double>(waves * multiprocessors) * static_cast<double>(tile.m * tile.n) *
         static_cast<double>(inner) / tile.efficiency;
}

double flops_in_waves(const MatrixProduct& product, int64_t multiprocessors) {
  double least = 0;
  for (const Tile& tile : kTiles) {
    const double flops = flops_with_tile(product, tile, multiprocessors);
    if (least == 0 || flops < least) least = flops;
  }
  return least;
}

bool is_in_tf32(const OperatorWork& work) {
  const bool is_of_cudnn =
      work.kind == WorkKind::convolution || work.kind == WorkKind::grouped_convolution || work.kind == WorkKind::rnn;
  return work.precision == WorkPrecision::fp32 && is_of_cudnn;
}

int64_t rate_of(const OperatorWork& work, const DeviceRates& rates) {
  if (work.kind == WorkKind::depthwise_convolution) return rates.flops[static_cast<size_t>(WorkPrecision::fp32)];
  if (is_in_tf32(work) && rates.tf32_flops > 0) return rates.tf32_flops;
  return rates.flops[static_cast<size_t>(work.precision)];
}

/// Depthwise convolutions use no tensor cores and have no tiles; attention has its own, over all of its products.
double counted_flops(const OperatorWork& work, const DeviceRates& rates) {
  const bool has_tiles =
      work.kind != WorkKind::depthwise_convolution && work.kind != WorkKind::attention && work.kind != WorkKind::rnn;
  if (!has_tiles) return static_cast<double>(work.flops());
  double sum = 0;
  for (const MatrixProduct& product : work.products) sum += flops_in_waves(product, std::max(rates.multiprocessors, 1));
  return sum;
}

/// cuDNN brings the inputs and outputs of convolutions into another layout around the kernel that computes.
bool moves_bytes_first(WorkKind kind) {
  return kind == WorkKind::convolution || kind == WorkKind::grouped_convolution ||
         kind == WorkKind::depthwise_convolution;
}

/// A thread block takes the elements of its channel one after the other, at a speed that depends on latency and not on the bandwidth of the
/// GPU: with few channels most of the GPU is idle.
double elements_in_turn(const ChannelBlocks& blocks, int64_t multiprocessors) {
  constexpr int64_t kBlocksOfMultiprocessor = 2;  // of up to 1024 threads
  const int64_t at_once = kBlocksOfMultiprocessor * std::max<int64_t>(multiprocessors, 1);
  return static_cast<double>(divide_up(blocks.channels, at_once) * blocks.elements);
}

KernelFamily batch_norm_family(bool of_cudnn, bool is_backward) {
  if (of_cudnn) return is_backward ? KernelFamily::cudnn_batch_norm_backward : KernelFamily::cudnn_batch_norm;
  return is_backward ? KernelFamily::batch_norm_backward : KernelFamily::batch_norm;
}

KernelFamily hopper_family(const OperatorWork& work) {
  const bool is_half = work.precision == WorkPrecision::fp16 || work.precision == WorkPrecision::bf16;
  if (!is_half && work.precision != WorkPrecision::fp32) return KernelFamily::usual;
  if (work.kind == WorkKind::matrix_product && is_half) return KernelFamily::hopper_half_product;
  if (work.kind == WorkKind::convolution || work.kind == WorkKind::grouped_convolution)
    return is_half ? KernelFamily::hopper_half_convolution : KernelFamily::hopper_tf32_convolution;
  if (work.kind == WorkKind::attention && is_half) return KernelFamily::hopper_half_attention;
  return KernelFamily::usual;
}

double nanoseconds(double amount, int64_t per_second) { return 1e9 * amount / static_cast<double>(per_second); }

}  // namespace

KernelFamily family_of(const OperatorWork& work, const DeviceRates& rates) {
  constexpr int kHopper = 9;
  if (work.channel_blocks) return batch_norm_family(work.channel_blocks->of_cudnn, work.is_backward);
  const bool is_fp32 = work.precision == WorkPrecision::fp32;
  if (work.kind == WorkKind::depthwise_convolution && is_fp32 && work.is_backward)
    return KernelFamily::depthwise_fp32_backward;
  if (work.kind == WorkKind::attention && is_fp32)
    return work.is_backward ? KernelFamily::fp32_attention_backward : KernelFamily::fp32_attention;
  return rates.capability_major == kHopper ? hopper_family(work) : KernelFamily::usual;
}

std::optional<PeakTime> peak_time(const OperatorWork& work, const DeviceRates& rates) {
  PeakTime time;
  if (work.flops() > 0) {
    const int64_t rate = rate_of(work, rates);
    if (rate == 0) return std::nullopt;
    time.compute_ns = nanoseconds(counted_flops(work, rates), rate);
  }
  if (work.bus_bytes > 0) {
    if (rates.bus_bytes == 0) return std::nullopt;
    time.bus_ns = nanoseconds(static_cast<double>(work.bus_bytes), rates.bus_bytes);
    return time;
  }
  if (rates.memory_bytes == 0) return std::nullopt;
  time.memory_ns = nanoseconds(static_cast<double>(work.memory_bytes), rates.memory_bytes);
  if (work.channel_blocks) time.channel_ns = elements_in_turn(*work.channel_blocks, rates.multiprocessors);
  return time;
}

std::optional<ModelledTime> modelled_time(const OperatorWork& work, const DeviceRates& rates) {
  const std::optional<PeakTime> peak = peak_time(work, rates);
  if (!peak) return std::nullopt;
  const TimeCoefficients& of = kTimeCoefficients[static_cast<size_t>(work.kind)][work.is_backward ? 1 : 0];
  const double family = kFamilyCoefficients[static_cast<size_t>(family_of(work, rates))];
  const double times[] = {peak->compute_ns * of.compute * family,
                          std::max(peak->memory_ns * of.memory, peak->channel_ns * family),
                          peak->bus_ns * kBusCoefficient, static_cast<double>(work.launches) * kLaunchNs};
  const auto* const longest = std::max_element(std::begin(times), std::end(times));
  const double body = moves_bytes_first(work.kind) ? times[0] + times[1] : std::max({times[0], times[1], times[2]});
  return ModelledTime{.ns = body + times[3], .bound_by = static_cast<BoundBy>(longest - std::begin(times))};
}

double full_rate_ns(const OperatorWork& work, const DeviceRates& rates) {
  const int64_t rate = rate_of(work, rates);
  return rate > 0 ? nanoseconds(static_cast<double>(work.flops()), rate) : 0;
}

double host_ns(std::string_view phase, const OperatorWork& work) {
  const auto* const of = std::ranges::find(kHostCoefficients, phase, &HostCoefficient::phase);
  if (of == std::end(kHostCoefficients)) return 0;
  return of->call_ns * static_cast<double>(phase == "optimizer" ? work.tensors : 1);
}

std::string_view name_of(KernelFamily family) {
  constexpr std::string_view kNames[] = {"usual",
                                         "batch_norm",
                                         "batch_norm_backward",
                                         "cudnn_batch_norm",
                                         "cudnn_batch_norm_backward",
                                         "depthwise_fp32_backward",
                                         "hopper_half_product",
                                         "hopper_tf32_convolution",
                                         "hopper_half_convolution",
                                         "hopper_half_attention",
                                         "fp32_attention",
                                         "fp32_attention_backward"};
  return kNames[static_cast<size_t>(family)];
}

std::string_view name_of(BoundBy bound) {
  constexpr std::string_view kNames[] = {"compute", "memory bandwidth", "bus", "launches", "host", "communication"};
  return kNames[static_cast<size_t>(bound)];
}

ErrorOfModel error_of_model() { return {.low = kErrorLow, .high = kErrorHigh}; }

}  // namespace oomdiag
