#include "profiler/cost/time_model.h"

#include <algorithm>
#include <iterator>
#include <limits>

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
constexpr int64_t kMaxSplits = 16;

bool is_hopper(const DeviceRates& rates) { return rates.capability_major == 9; }

/// FLOPs that the multiprocessors could have done in the time in which they do this product, in `splits` parts of its inner dimension.
double flops_in_parts(const MatrixProduct& product, const Tile& tile, int64_t multiprocessors, int64_t splits) {
  const int64_t tiles = product.batch * divide_up(product.m, tile.m) * divide_up(product.n, tile.n);
  const int64_t inner = divide_up(divide_up(product.k, splits), 32) * 32;
  const int64_t waves = divide_up(tiles * splits, multiprocessors);
  return 2.0 * static_cast<double>(waves * multiprocessors) * static_cast<double>(tile.m * tile.n) *
         static_cast<double>(inner) / tile.efficiency;
}

/// The least of all tiles and numbers of parts that libraries choose among. A product with a vector has no tiles.
double flops_in_waves(const MatrixProduct& product, int64_t multiprocessors) {
  if (std::min(product.m, product.n) == 1)
    return static_cast<double>(product.flops()) / static_cast<double>(product.steps);
  const int64_t most_splits = std::clamp<int64_t>(product.k / kLeastOfSplit, 1, kMaxSplits);
  double least = std::numeric_limits<double>::infinity();
  for (const Tile& tile : kTiles) {
    for (int64_t splits = 1; splits <= most_splits; ++splits)
      least = std::min(least, flops_in_parts(product, tile, multiprocessors, splits));
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

/// On Hopper the channels of a convolution without groups fill whole lines of 128 bytes for each place of the window.
MatrixProduct fill_lines(MatrixProduct product, WorkPrecision precision) {
  const int64_t of_line = precision == WorkPrecision::fp32 ? 32 : 64;
  if (product.window > 1 && product.batch == 1)
    product.k = divide_up(product.k / product.window, of_line) * of_line * product.window;
  return product;
}

/// Depthwise convolutions use no tensor cores and have no tiles; attention has its own, over all of its products, and skips those that a
/// causal mask hides.
double counted_flops(const OperatorWork& work, const DeviceRates& rates) {
  const bool has_tiles = work.kind != WorkKind::depthwise_convolution && work.kind != WorkKind::attention;
  if (!has_tiles) return static_cast<double>(work.flops()) * (work.is_causal ? 0.5 : 1);
  double sum = 0;
  for (const MatrixProduct& product : work.products)
    sum += static_cast<double>(product.steps) *
           flops_in_waves(is_hopper(rates) ? fill_lines(product, work.precision) : product,
                          std::max(rates.multiprocessors, 1));
  return sum;
}

/// A thread block takes its elements one after the other, at a speed that depends on latency and not on the bandwidth of the GPU: with few
/// blocks most of the GPU is idle.
double elements_in_turn(const SerialBlocks& blocks, int64_t multiprocessors) {
  constexpr int64_t kBlocksOfMultiprocessor = 2;  // of up to 1024 threads
  const int64_t at_once = kBlocksOfMultiprocessor * std::max<int64_t>(multiprocessors, 1);
  return static_cast<double>(divide_up(blocks.blocks, at_once) * blocks.elements);
}

bool is_half(const OperatorWork& work) {
  return work.precision == WorkPrecision::fp16 || work.precision == WorkPrecision::bf16;
}

KernelFamily backward_if(const OperatorWork& work, KernelFamily forward, KernelFamily backward) {
  return work.is_backward ? backward : forward;
}

KernelFamily by_order(ElementOrder order, KernelFamily plain, KernelFamily mixed, KernelFamily strided) {
  if (order == ElementOrder::plain) return plain;
  return order == ElementOrder::mixed ? mixed : strided;
}

KernelFamily product_family(const OperatorWork& work, bool on_hopper) {
  if (!on_hopper || !is_half(work)) return KernelFamily::matrix_product;
  if (work.alignment == 8) return KernelFamily::hopper_product;
  return work.alignment > 1 ? KernelFamily::hopper_even_product : KernelFamily::hopper_odd_product;
}

KernelFamily convolution_family(const OperatorWork& work, bool on_hopper) {
  using enum KernelFamily;
  const bool is_pointwise = work.window == 1;
  if (!on_hopper || (!is_half(work) && work.precision != WorkPrecision::fp32))
    return backward_if(work, convolution, convolution_backward);
  if (is_half(work)) {
    return is_pointwise ? backward_if(work, hopper_half_pointwise, hopper_half_pointwise_backward)
                        : backward_if(work, hopper_half_convolution, hopper_half_convolution_backward);
  }
  return is_pointwise ? backward_if(work, hopper_tf32_pointwise, hopper_tf32_pointwise_backward)
                      : backward_if(work, hopper_tf32_convolution, hopper_tf32_convolution_backward);
}

KernelFamily depthwise_family(const OperatorWork& work) {
  using enum KernelFamily;
  switch (work.depthwise) {
    case DepthwiseKernel::pytorch:
      return backward_if(work, own_depthwise_convolution, own_depthwise_convolution_backward);
    case DepthwiseKernel::cudnn:
      return backward_if(work, depthwise_convolution, depthwise_convolution_backward);
    case DepthwiseKernel::cudnn_channels_last:
      break;
  }
  return is_half(work) ? backward_if(work, half_channels_last_depthwise, half_channels_last_depthwise_backward)
                       : backward_if(work, fp32_channels_last_depthwise, fp32_channels_last_depthwise_backward);
}

KernelFamily attention_family(const OperatorWork& work, bool on_hopper) {
  using enum KernelFamily;
  if (work.precision == WorkPrecision::fp32) return backward_if(work, fp32_attention, fp32_attention_backward);
  if (on_hopper && is_half(work)) return backward_if(work, hopper_attention, hopper_attention_backward);
  return backward_if(work, attention, attention_backward);
}

KernelFamily normalization_family(const OperatorWork& work) {
  using enum KernelFamily;
  constexpr int64_t kTall = 65536;  // rows, ATen/native/cuda/layer_norm_kernel.cu
  if (work.serial_blocks && work.serial_blocks->of_cudnn)
    return backward_if(work, cudnn_batch_norm, cudnn_batch_norm_backward);
  if (work.serial_blocks) return backward_if(work, batch_norm, batch_norm_backward);
  if (!work.is_layer_norm) return backward_if(work, normalization, normalization_backward);
  return backward_if(work, layer_norm, work.turns > kTall ? tall_layer_norm_backward : layer_norm_backward);
}

/// How the times of a family come together, in the order of KernelFamily.
enum class Form { sum, longest };
constexpr Form kForms[] = {
#define OOMDIAG_FAMILY(name, form) Form::form,
#include "profiler/cost/kernel_families.h"
#undef OOMDIAG_FAMILY
};

static_assert(std::size(kTimeCoefficients) == std::size(kForms), "scripts/fit_time_model writes those of all families");

double nanoseconds(double amount, int64_t per_second) { return 1e9 * amount / static_cast<double>(per_second); }

}  // namespace

KernelFamily family_of(const OperatorWork& work, const DeviceRates& rates) {
  using enum KernelFamily;
  const bool on_hopper = is_hopper(rates);
  switch (work.kind) {
    case WorkKind::matrix_product:
      return product_family(work, on_hopper);
    case WorkKind::fp32_product:
      return fp32_product;
    case WorkKind::convolution:
      return convolution_family(work, on_hopper);
    case WorkKind::grouped_convolution:
      return on_hopper ? backward_if(work, hopper_grouped_convolution, hopper_grouped_convolution_backward)
                       : backward_if(work, grouped_convolution, grouped_convolution_backward);
    case WorkKind::depthwise_convolution:
      return depthwise_family(work);
    case WorkKind::attention:
      return attention_family(work, on_hopper);
    case WorkKind::rnn:
      return backward_if(work, rnn, rnn_backward);
    case WorkKind::elementwise:
      return by_order(work.order, elementwise, mixed_elementwise, strided_elementwise);
    case WorkKind::normalization:
      return normalization_family(work);
    case WorkKind::softmax:
      return backward_if(work, softmax, softmax_backward);
    case WorkKind::reduction:
      return reduction;
    case WorkKind::pooling:
      return backward_if(work, pooling, pooling_backward);
    case WorkKind::interpolation:
      return backward_if(work, interpolation, interpolation_backward);
    case WorkKind::indexing:
      return work.scatters ? scattering : backward_if(work, indexing, indexing_backward);
    case WorkKind::embedding_gradient:
      return embedding_gradient;
    case WorkKind::label_loss:
      return label_loss;
    case WorkKind::copy:
      return by_order(work.order, copy, mixed_copy, strided_copy);
    case WorkKind::factorization:
      return factorization;
    case WorkKind::optimizer:
      return optimizer;
    case WorkKind::fused:
      return fused;
    case WorkKind::other:
      return other;
  }
  return other;
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
  time.turns_ns = work.serial_blocks ? elements_in_turn(*work.serial_blocks, rates.multiprocessors)
                                     : static_cast<double>(work.turns) / std::max(rates.multiprocessors, 1);
  return time;
}

std::optional<ModelledTime> modelled_time(const OperatorWork& work, const DeviceRates& rates) {
  const std::optional<PeakTime> peak = peak_time(work, rates);
  if (!peak) return std::nullopt;
  const auto family = static_cast<size_t>(family_of(work, rates));
  const TimeCoefficients& of = kTimeCoefficients[family];
  const bool is_sum = kForms[family] == Form::sum;
  const double memory = peak->memory_ns * of.memory, turns = peak->turns_ns * of.turn_ns;
  const double times[] = {peak->compute_ns * of.compute, is_sum ? memory + turns : std::max(memory, turns),
                          peak->bus_ns * kBusCoefficient, static_cast<double>(work.launches) * kLaunchNs};
  const auto* const longest = std::max_element(std::begin(times), std::end(times));
  const double body = is_sum ? times[0] + times[1] : std::max({times[0], times[1], times[2]});
  return ModelledTime{.ns = body + times[3], .bound_by = static_cast<BoundBy>(longest - std::begin(times))};
}

double full_rate_ns(const OperatorWork& work, const DeviceRates& rates) {
  const int64_t rate = rate_of(work, rates);
  return rate > 0 ? nanoseconds(static_cast<double>(work.flops()), rate) : 0;
}

double host_ns(std::string_view phase, const OperatorWork& work, const DeviceRates& rates) {
  const auto* const of = std::ranges::find(kHostCoefficients, phase, &HostCoefficient::phase);
  if (of == std::end(kHostCoefficients)) return 0;
  const double usual_ns = kHostCoefficients[0].call_ns;  // in forward
  const double here_ns = rates.host_ns_per_operator > 0 ? static_cast<double>(rates.host_ns_per_operator) : usual_ns;
  return of->call_ns * here_ns / usual_ns * static_cast<double>(phase == "optimizer" ? work.tensors : 1);
}

std::string_view name_of(KernelFamily family) {
  constexpr std::string_view kNames[] = {
#define OOMDIAG_FAMILY(name, form) #name,
#include "profiler/cost/kernel_families.h"
#undef OOMDIAG_FAMILY
  };
  return kNames[static_cast<size_t>(family)];
}

std::string_view name_of(BoundBy bound) {
  constexpr std::string_view kNames[] = {"compute", "memory bandwidth", "bus", "launches", "host", "communication"};
  return kNames[static_cast<size_t>(bound)];
}

ErrorOfModel error_of_model() { return {.low = kErrorLow, .high = kErrorHigh}; }

}  // namespace oomdiag
