#include "cli/device/device.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <sstream>

#include "cli/device/gpus.h"
#include "cli/process/workers.h"
#include "cli/python/install.h"
#include "cli/terminal/help.h"
#include "cli/terminal/sizes.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

constexpr const char* kDefaultGpu = "h200";
constexpr int kLeastDriverOfCuda13 = 580;  // CUDA Toolkit release notes
constexpr int64_t kLeastMemory = int64_t{256} << 20;

void check_one_driver(const std::vector<GpuEntry>& gpus) {
  const GpuEntry& first = gpus.front();
  const auto other = std::ranges::find_if(gpus, [&](const GpuEntry& gpu) { return gpu.driver != first.driver; });
  if (other != gpus.end()) {
    throw Error(ErrorKind::usage, fmt::format("{} and {} in one machine: it has one driver", first.id, other->id));
  }
  const auto unknown = std::ranges::find_if_not(gpus, &GpuEntry::knows_driver);
  if (unknown == gpus.end()) return;
  if (first.driver.is_wddm) {
    throw Error(ErrorKind::usage,
                fmt::format("no {}: how much memory the {} has under WDDM is not known", first.id, unknown->name),
                "WDDM is the driver model of Windows for GeForce and RTX GPUs; those of data centres run as on Linux");
  }
  say(fmt::format("what a driver of branch {} leaves of the memory of {} is not known: taken is what newer ones leave",
                  first.driver.branch, unknown->gpu.id));
}

/// `count` of one GPU, or each GPU of a list once.
std::vector<GpuEntry> repeat(std::vector<GpuEntry> gpus, int count) {
  if (count > 0 && gpus.size() > 1) {
    throw Error(ErrorKind::usage, "--count repeats one device, and --device names several",
                "name each as often as it is needed: --device a100-80,a100-80,t4");
  }
  if (count > 0) gpus.resize(static_cast<std::size_t>(count), GpuEntry(gpus.front()));
  if (gpus.size() > kMaxGpus) {
    throw Error(ErrorKind::usage, fmt::format("{} devices are too many", gpus.size()),
                fmt::format("valid: 1 to {}", kMaxGpus));
  }
  return gpus;
}

int64_t read_memory(const std::string& memory) {
  const int64_t bytes = parse_bytes(memory);
  if (bytes < kLeastMemory || bytes > kMaxGpuBytes) {
    throw Error(ErrorKind::usage, fmt::format("--memory {} is out of range", memory), "valid: 256MiB to 16TiB");
  }
  return bytes;
}

/// From the documented driver API (cuda.h): all return CUDA_SUCCESS = 0.
std::string ask_driver() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return {};
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  const auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  if (init == nullptr || get_count == nullptr || get_name == nullptr || init(0) != 0) return {};
  int count = 0;
  if (get_count(&count) != 0 || count == 0) return {};
  std::array<char, 256> name{};
  return get_name(name.data(), static_cast<int>(name.size()) - 1, 0) == 0 ? name.data() : "";
}

}  // namespace

void add_device_options(CLI::App& command, DeviceOptions& options) {
  command
      .add_option("--device", options.device,
                  "real, a name of oomdiag devices, with an older driver as in rtx3090@550, under Windows as in "
                  "rtx4090@wddm, ./device.json, or a list as in a100-80,t4; default: a real GPU, else h200")
      ->type_name("NAME");
  command.add_option("--memory", options.memory, "memory of each virtual device in place of the GPU's own, as in 8GiB")
      ->type_name("SIZE");
  command.add_option("--count", options.count, "that many of the virtual device")
      ->type_name("N")
      ->check(range(1, kMaxGpus));
  command.add_flag("--clocked", options.clocked,
                   "work on the virtual device takes modelled time: frees across streams wait for it");
}

std::string describe(const VirtualHost& host) {
  const std::string& name = host.gpus.front().name;
  if (host.gpus.size() == 1) return name + " (virtual)";
  if (std::ranges::all_of(host.gpus, [&](const GpuEntry& gpu) { return gpu.name == name; })) {
    return fmt::format("{} x {} (virtual)", host.gpus.size(), name);
  }
  std::vector<std::string> names;
  for (const GpuEntry& gpu : host.gpus) names.push_back(gpu.name);
  return fmt::format("{} (virtual)", fmt::join(names, ", "));
}

std::string describe(const DeviceChoice& choice) {
  const VirtualHost* const host = choice.virtual_host();
  return host == nullptr ? "the real GPU" : describe(*host);
}

void say_default(const DeviceChoice& choice) {
  const VirtualHost* const host = choice.virtual_host();
  if (!choice.by_default || host == nullptr) return;
  say(fmt::format("no --device and no GPU: running on a virtual {}; oomdiag devices lists others",
                  host->gpus.front().name));
}

bool names_real_gpu(const std::string& device) { return device == "real" || device == "cuda"; }

std::vector<GpuEntry> choose_gpus(const std::string& list, const Install& install) {
  std::vector<GpuEntry> gpus;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    if (!name.empty()) gpus.push_back(choose_gpu(install.gpus, name));
  }
  if (gpus.empty())
    throw Error(ErrorKind::usage, fmt::format("--device '{}' names no device", list), "as in: --device rtx4090");
  return gpus;
}

DeviceChoice choose_device(const DeviceOptions& options, const Install& install) {
  const int64_t memory_bytes = options.memory.empty() ? 0 : read_memory(options.memory);
  const bool by_default = options.device.empty(), names_real = names_real_gpu(options.device);
  const bool wants_virtual = memory_bytes != 0 || options.count != 0 || options.clocked;
  if (names_real && wants_virtual) {
    throw Error(ErrorKind::usage, "--memory, --count and --clocked are for virtual devices only",
                "name one: --device rtx4090");
  }
  if (names_real) return {.device = RealGpu{name_of_real_gpu()}};
  if (by_default && !wants_virtual) {
    if (std::string name = name_of_real_gpu(); !name.empty()) {
      return {.device = RealGpu{std::move(name)}, .by_default = true};
    }
  }
  const std::vector<GpuEntry> gpus = choose_gpus(by_default ? kDefaultGpu : options.device, install);
  check_one_driver(gpus);
  return {
      .device =
          VirtualHost{.gpus = repeat(gpus, options.count), .memory_bytes = memory_bytes, .clocked = options.clocked},
      .by_default = by_default && !wants_virtual};
}

void require_gpu(const DeviceChoice& choice) {
  const RealGpu* const gpu = std::get_if<RealGpu>(&choice.device);
  if (gpu == nullptr || !gpu->name.empty()) return;
  throw Error(ErrorKind::environment, "no NVIDIA GPU or no driver was found here",
              "leave out --device, or name a virtual device, as in: --device rtx4090");
}

void check_driver(const DeviceChoice& choice, const std::string& torch_version) {
  const VirtualHost* const host = choice.virtual_host();
  if (host == nullptr) return;
  const GpuEntry& gpu = host->gpus.front();
  const std::size_t cuda = torch_version.find("+cu");
  const bool is_cuda_13 = cuda != std::string::npos && torch_version.compare(cuda, 5, "+cu13") == 0;
  const int branch = gpu.driver.branch;
  if (branch == 0 || !is_cuda_13 || branch >= kLeastDriverOfCuda13) return;
  throw Error(ErrorKind::usage, fmt::format("torch {} needs a driver of branch {} or newer: no --device {}",
                                            torch_version, kLeastDriverOfCuda13, gpu.id));
}

std::string name_of_real_gpu() {
  return run_in_processes({ask_driver}, 1, [](std::size_t) {}).front().value_or("");
}

}  // namespace oomdiag
