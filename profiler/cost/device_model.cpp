#include "profiler/cost/device_model.h"

#include <algorithm>
#include <cmath>

namespace oomdiag {
namespace {

/// Fused multiply-adds per clock and multiprocessor: CUDA programming guide, "Arithmetic Instructions" for fp32 and fp64; the
/// architectures' whitepapers for dense 16-bit products on tensor cores with sums in fp32.
struct PerClock {
  int major, minor;
  double fp32, fp64, fp16, bf16;
};
constexpr PerClock kPerClock[] = {
    {7, 0, 64, 32, 512, 0},   {7, 5, 64, 2, 512, 0},    {8, 0, 64, 32, 1024, 1024},
    {8, 6, 128, 2, 512, 512}, {8, 9, 128, 2, 512, 512}, {9, 0, 128, 64, 2048, 2048},
};

constexpr double kLaunchNs = 4000;

double seconds_to_compute(const Work& work, const DeviceRates& rates, bool& known) {
  double seconds = 0;
  for (size_t i = 0; i < work.flops.size(); ++i) {
    if (work.flops[i] == 0) continue;
    known = known && rates.flops_per_second[i] > 0;
    if (rates.flops_per_second[i] > 0) seconds += static_cast<double>(work.flops[i]) / rates.flops_per_second[i];
  }
  return seconds;
}

}  // namespace

DeviceRates derive_rates(const DeviceFacts& device) {
  const auto* of = std::find_if(std::begin(kPerClock), std::end(kPerClock), [&](const PerClock& one) {
    return one.major == device.compute_major && one.minor == device.compute_minor;
  });
  if (of == std::end(kPerClock)) return {};
  const double clocks = 2e3 * static_cast<double>(device.clock_khz) * device.multiprocessors;
  const double tensor = device.is_geforce_rtx ? clocks / 2 : clocks;
  DeviceRates rates;
  rates.flops_per_second = {clocks * of->fp32, tensor * of->fp16, tensor * of->bf16, clocks * of->fp64, 0};
  rates.bytes_per_second =
      2e3 * static_cast<double>(device.memory_clock_khz) * static_cast<double>(device.memory_bus_bits) / 8;
  return rates;
}

LeastTime least_time(const Work& work, const DeviceRates& rates) {
  bool known = rates.bytes_per_second > 0;
  const double compute = 1e9 * seconds_to_compute(work, rates, known);
  if (!known) return {};
  const double memory = 1e9 * static_cast<double>(work.memory_bytes) / rates.bytes_per_second;
  const double launches = kLaunchNs * static_cast<double>(work.launches);
  const double longest = std::max({compute, memory, launches});
  const BoundBy bound = longest == launches ? BoundBy::launches
                        : longest == memory ? BoundBy::memory
                                            : BoundBy::compute;
  return {.ns = std::llround(longest), .bound_by = bound};
}

}  // namespace oomdiag
