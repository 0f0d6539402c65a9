#include "profiler/explain/facts/imbalance.h"

#include <algorithm>
#include <vector>

#include "profiler/replay/history.h"

namespace oomdiag {

std::optional<Imbalance> find_imbalance(std::span<const int64_t> peak_bytes, size_t failed, int64_t requested_bytes,
                                        int64_t gpu_bytes) {
  if (failed >= peak_bytes.size()) return std::nullopt;
  const int64_t fullest = peak_bytes[failed];
  std::vector<int64_t> others;
  int64_t sum = fullest + requested_bytes;
  for (size_t i = 0; i < peak_bytes.size(); ++i) {
    if (i == failed || peak_bytes[i] < fullest / 20) continue;
    others.push_back(peak_bytes[i]);
    sum += peak_bytes[i];
  }
  if (others.empty()) return std::nullopt;
  const auto middle = others.begin() + static_cast<std::ptrdiff_t>(others.size() / 2);
  std::nth_element(others.begin(), middle, others.end());
  const Imbalance found{fullest, *middle, sum / static_cast<int64_t>(others.size() + 1)};
  const bool lopsided = fullest / 3 * 2 >= found.others_bytes;
  return lopsided && found.even_bytes <= gpu_bytes ? std::optional(found) : std::nullopt;
}

namespace {

// Over the steps before `step`; 0 where none of them is known.
int64_t peak_before(const DeviceHistory& device, uint32_t step) {
  int64_t peak = 0;
  for (const PhasePeak& one : device.phases) {
    if (one.step > 0 && one.step < step) peak = std::max(peak, one.allocated_bytes);
  }
  return peak;
}

std::vector<int64_t> expect_peaks(const std::vector<DeviceHistory>& devices, size_t failed) {
  const DeviceHistory& full = devices[failed];
  const int64_t before = peak_before(full, full.failure->step);
  const double growth = before == 0 ? 0
                                    : static_cast<double>(full.peak.allocated_bytes + full.failure->requested_bytes) /
                                          static_cast<double>(before);
  std::vector<int64_t> peaks;
  for (const DeviceHistory& device : devices) {
    const auto grown = static_cast<int64_t>(growth * static_cast<double>(peak_before(device, full.failure->step)));
    peaks.push_back(&device == &full ? full.peak.allocated_bytes : std::max(device.peak.allocated_bytes, grown));
  }
  return peaks;
}

}  // namespace

std::optional<Imbalance> compare_devices(const std::vector<DeviceHistory>& devices, size_t failed) {
  if (!devices[failed].failure) return std::nullopt;
  const MemoryState& state = devices[failed].state;
  const int64_t available = state.free_bytes + state.reserved_bytes;
  return find_imbalance(expect_peaks(devices, failed), failed, devices[failed].failure->requested_bytes, available);
}

}  // namespace oomdiag
