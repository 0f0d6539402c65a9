#include "cli/device/gpus.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "cli/python/install.h"
#include "cli/terminal/nearest.h"
#include "extension/environment.h"
#include "extension/virtual_device/device_files/gpu.h"
#include "profiler/cost/operator_work.h"
#include "profiler/cost/time_model.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

// OOMDIAG_ARCHITECTURES comes from cli/CMakeLists.txt: "75,80,86,…".
std::string architectures() {
  const std::string own = environment(variables::kArchitectures);
  return own.empty() ? OOMDIAG_ARCHITECTURES : own;
}

/// "7.5, 8.0 and 12.0" of "75,80,120".
std::string list_capabilities() {
  std::vector<std::string> capabilities;
  std::istringstream list(architectures());
  for (std::string entry; std::getline(list, entry, ',');) {
    if (entry.size() > 1) capabilities.push_back(entry.insert(entry.size() - 1, "."));
  }
  if (capabilities.size() < 2) return fmt::format("{}", fmt::join(capabilities, ""));
  const std::string last = capabilities.back();
  capabilities.pop_back();
  return fmt::format("{} and {}", fmt::join(capabilities, ", "), last);
}

std::string explain_no_code(ComputeCapability capability) {
  return fmt::format("its compute capability is {}, and this torch has code for {}", capability.text(),
                     list_capabilities());
}

/// Of "8.6"; 0.0 if it is none.
ComputeCapability read_capability(const std::string& text) {
  ComputeCapability capability;
  const char* const end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, capability.major);
  if (major.ptr != end) std::from_chars(major.ptr + 1, end, capability.minor);
  return capability;
}

GpuEntry entry_of(const Gpu& gpu, const std::filesystem::path& file) {
  const ComputeCapability capability{gpu.compute_major, gpu.compute_minor};
  return {.id = gpu.id,
          .name = gpu.name,
          .aliases = gpu.aliases,
          .total_bytes = gpu.total_bytes,
          .mark = gpu.total_mark,
          .capability = capability,
          .context_bytes = gpu.context_bytes + gpu.first_kernel_bytes,
          .why_not = runs_code_for(gpu, architectures()) ? "" : explain_no_code(capability),
          .file = file,
          .gpu = gpu};
}

std::vector<GpuEntry> read_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<GpuEntry> gpus;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".json") gpus.push_back(read_gpu_entry(entry.path()));
  }
  if (error) {
    throw Error(ErrorKind::environment,
                fmt::format("cannot read the GPUs in '{}': {}", folder.string(), error.message()),
                "was the checkout moved? build it again: scripts/build");
  }
  std::sort(gpus.begin(), gpus.end(), [](const GpuEntry& left, const GpuEntry& right) {
    return std::pair(left.total_bytes, left.id) < std::pair(right.total_bytes, right.id);
  });
  return gpus;
}

bool goes_by(const GpuEntry& gpu, const std::string& typed) {
  const auto is_typed = [&](const std::string& name) { return plain_name(name) == typed; };
  return is_typed(gpu.id) || is_typed(gpu.name) || std::any_of(gpu.aliases.begin(), gpu.aliases.end(), is_typed);
}

Error unsupported(const GpuEntry& gpu) {
  const std::string called = gpu.file.empty() ? gpu.name : fmt::format("{}, {}", gpu.id, gpu.name);
  return {ErrorKind::usage, fmt::format("no virtual {}: {}", called, gpu.why_not),
          "oomdiag devices lists the GPUs that it runs on"};
}

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

std::string ComputeCapability::text() const { return fmt::format("{}.{}", major, minor); }

GpuEntry read_gpu_entry(const std::filesystem::path& file) {
  try {
    return entry_of(read_gpu(file.string()), std::filesystem::absolute(file));
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::input, fmt::format("'{}' is not a GPU: {}", file.string(), error.what()),
                "copy one of extension/virtual_device/device_files and change its numbers");
  }
}

std::vector<GpuEntry> read_catalogue(const std::filesystem::path& folder) {
  std::vector<GpuEntry> gpus = read_folder(folder);
  std::erase_if(gpus, [](const GpuEntry& gpu) { return !gpu.why_not.empty(); });
  return gpus;
}

std::vector<GpuEntry> read_unsupported(const std::filesystem::path& folder) {
  std::vector<GpuEntry> gpus = read_folder(folder);
  std::erase_if(gpus, [](const GpuEntry& gpu) { return gpu.why_not.empty(); });
  std::ifstream stream(folder.parent_path() / "gpus_without_profile.json");
  const nlohmann::json others = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!others.is_array()) return gpus;  // a folder of somebody's own, which has none
  for (const nlohmann::json& json : others) {
    const ComputeCapability capability = read_capability(json.at("compute_capability"));
    GpuEntry gpu;
    gpu.id = json.at("id");
    gpu.name = json.at("name");
    gpu.capability = capability;
    gpu.why_not = json.value("why", explain_no_code(capability));
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

const GpuEntry& find_gpu(const std::vector<GpuEntry>& catalogue, std::string_view name) {
  const std::string typed = plain_name(name);
  std::vector<std::string> ids;
  for (const GpuEntry& gpu : catalogue) {
    if (goes_by(gpu, typed)) return gpu;
    ids.push_back(gpu.id);
  }
  throw Error(ErrorKind::usage, fmt::format("unknown device '{}'", name),
              did_you_mean(name, ids, "oomdiag devices lists them all; ./device.json takes one of your own"));
}

bool GpuEntry::knows_driver() const {
  if (driver.is_wddm) return gpu.wddm_total_bytes != 0;
  return driver.branch == 0 || driver.branch > kOlderDrivers || gpu.older_total_bytes != 0;
}

Driver take_driver(std::string& device) {
  const std::size_t at = device.rfind('@');
  if (at == std::string::npos || device.find('/', at) != std::string::npos) return {};
  const std::string text = device.substr(at + 1);
  try {
    if (text.empty()) throw std::invalid_argument("names no driver");
    const Driver driver = parse_driver(text);
    device.resize(at);
    return driver;
  } catch (const std::invalid_argument& reason) {
    throw Error(ErrorKind::usage, fmt::format("--device {}: '{}' {}", device, text, reason.what()),
                fmt::format("valid: {} to {}, as nvidia-smi has it before the first point, wddm, or wddm+16GiB",
                            kLeastDriver, kMaxDriver));
  }
}

GpuEntry with_driver(GpuEntry gpu, const Driver& driver) {
  if (driver == Driver{}) return gpu;
  gpu.driver = driver;
  gpu.gpu = with_driver(std::move(gpu.gpu), driver);
  gpu.total_bytes = gpu.gpu.total_bytes;
  gpu.mark = gpu.gpu.total_mark;
  gpu.id += "@" + to_text(driver);
  return gpu;
}

GpuEntry choose_gpu(const std::filesystem::path& folder, const std::string& name) {
  std::string device = name;
  const Driver driver = take_driver(device);
  if (device.find('/') != std::string::npos || device.ends_with(".json")) {
    const GpuEntry own = read_gpu_entry(device);
    if (!own.why_not.empty()) throw unsupported(own);
    return with_driver(own, driver);
  }
  for (const GpuEntry& gpu : read_unsupported(folder)) {
    if (goes_by(gpu, plain_name(device))) throw unsupported(gpu);
  }
  return with_driver(find_gpu(read_catalogue(folder), device), driver);
}

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
