#include "cli/device/rates.h"

#include <algorithm>
#include <vector>

#include "cli/device/gpus.h"
#include "cli/process/files.h"
#include "cli/python/install.h"
#include "extension/virtual_device/device_files/gpu.h"
#include "profiler/cost/operator_work.h"
#include "profiler/cost/time_model.h"

namespace oomdiag {
namespace {

DeviceRates rates_of_gpu(const GpuEntry& entry) {
  const Gpu& gpu = entry.gpu;
  DeviceRates rates{.tf32_flops = gpu.rates.tf32_flops,
                    .memory_bytes = gpu.rates.memory_bytes,
                    .bus_bytes = gpu.rates.bus_bytes,
                    .nvlink_bytes = gpu.rates.nvlink_bytes,
                    .host_ns_per_operator = gpu.rates.host_ns_per_operator,
                    .multiprocessors = gpu.multiprocessors,
                    .capability_major = entry.capability.major};
  const auto set = [&rates](WorkPrecision precision, int64_t flops) {
    rates.flops[static_cast<size_t>(precision)] = flops;
  };
  set(WorkPrecision::fp32, gpu.rates.fp32_flops);
  set(WorkPrecision::fp16, gpu.rates.fp16_flops);
  set(WorkPrecision::bf16, gpu.rates.bf16_flops);
  set(WorkPrecision::fp8, gpu.rates.fp8_flops);
  set(WorkPrecision::int8, gpu.rates.int8_flops);
  return rates;
}

}  // namespace

std::optional<DeviceRates> rates_of_device(std::string_view name, const std::filesystem::path& own) {
  if (!own.empty() && is_there(own)) {
    if (const GpuEntry gpu = read_gpu_entry(own); gpu.name == name) return rates_of_gpu(gpu);
  }
  const std::filesystem::path folder = find_install().gpus;
  for (const auto& gpus : {read_catalogue(folder), read_unsupported(folder)}) {
    const auto goes_by = [name](const GpuEntry& gpu) {
      return gpu.name == name || gpu.id == name || std::ranges::find(gpu.aliases, name) != gpu.aliases.end();
    };
    const auto found = std::ranges::find_if(gpus, goes_by);
    if (found != gpus.end() && !found->file.empty()) return rates_of_gpu(*found);
  }
  return std::nullopt;
}

}  // namespace oomdiag
