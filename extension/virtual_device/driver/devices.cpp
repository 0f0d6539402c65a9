#include "extension/virtual_device/driver/devices.h"

#include <cuda.h>
#include <pthread.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>

#include "extension/environment.h"
#include "extension/virtual_device/device_files/gpu.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/shared_gpus.h"
#include "extension/virtual_device/driver/uuid.h"

namespace oomdiag {
namespace {

// Never destroyed: programs free device memory in their own static destructors, after ours would have run.
auto& installed = *new std::array<Device, kMaxVirtualDevices>;
auto& visible = *new std::array<Device*, kMaxVirtualDevices>;
std::atomic<size_t> installed_count = 0;
std::atomic<size_t> visible_count = 0;
std::atomic<CUresult> initialized = CUDA_ERROR_NOT_INITIALIZED;
std::atomic<bool> forked = false;

/// A device file's number may be overridden by a size in bytes: OOMDIAG_MEMORY.
void override_memory(Gpu& gpu) {
  const char* text = variables::text(variables::kMemory);
  if (!*text) return;
  char* end = nullptr;
  const long long bytes = std::strtoll(text, &end, 10);
  if (*end || bytes <= 0) throw std::runtime_error("OOMDIAG_MEMORY is not a number of bytes");
  gpu.total_bytes = bytes;
}

Driver read_driver() {
  const char* text = variables::text(variables::kDriver);
  try {
    return parse_driver(text);
  } catch (const std::invalid_argument& reason) {
    std::fprintf(stderr, "oomdiag: OOMDIAG_DRIVER %s %s: taken is the newest\n", text, reason.what());
    return {};
  }
}

/// The GPU as cuDNN wants a device described, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION; keys as published in
/// openxla/xla, target_config/cudnn_device_props.cc. The compute capability decides; the clocks changed no answer.
std::string describe_for_cudnn(const Gpu& gpu) {
  return nlohmann::json{{"deviceVer", gpu.compute_major * 100 + gpu.compute_minor * 10},
                        {"multiProcessorCount", gpu.multiprocessors},
                        {"warpSize", 32},
                        {"maxSharedMemoryPerBlock", gpu.shared_bytes_per_block},
                        {"maxSharedMemoryPerBlockOptin", gpu.shared_bytes_per_block_optin},
                        {"reservedSharedMemoryPerBlock", gpu.reserved_shared_bytes_per_block},
                        {"maxRegistersPerSM", gpu.registers_per_multiprocessor},
                        {"maxCtasPerSM", gpu.blocks_per_multiprocessor},
                        {"maxThreadsPerBlock", 1024},
                        {"maxThreadsPerSM", gpu.threads_per_multiprocessor},
                        {"regsPerBlock", 65536},
                        {"totalGlobalMem", gpu.total_bytes},
                        {"smClockRateKHz", gpu.clock_khz},
                        {"l2CacheSize", gpu.l2_bytes},
                        {"maxBlockSize", {1024, 1024, 64}},
                        {"memClockRateKHz", gpu.memory_clock_khz},
                        {"maxGridSize", {2147483647, 65535, 65535}},
                        {"supportCoopLaunch", 1},
                        {"pciDeviceId", 0},
                        {"isTccDriver", 0},
                        {"cudaDeviceId", 0},
                        {"driverVer", CUDA_VERSION},
                        {"deviceName", gpu.name}}
      .dump();
}

void read_device(Device& device, int index, const std::string& path) {
  device.index = index;
  device.gpu = with_driver(read_gpu(path), machine_driver());
  override_memory(device.gpu);
  device.cudnn_description = describe_for_cudnn(device.gpu);
  const char* architectures = variables::text(variables::kArchitectures);
  device.architecture = pick_architecture(device.gpu, *architectures ? architectures : OOMDIAG_BUILT_ARCHITECTURES);
}

/// The GPUs that `list` names, one file per line.
void read_devices(const char* list, std::string& reading) {
  std::istringstream lines(list);
  while (std::getline(lines, reading)) {
    if (reading.empty()) continue;
    if (installed_count == kMaxVirtualDevices) throw std::runtime_error("there can be no more than 16 GPUs");
    read_device(installed[installed_count], static_cast<int>(installed_count.load()), reading);
    ++installed_count;
  }
  if (installed_count == 0) throw std::runtime_error("OOMDIAG_DEVICE_FILES names no device file");
}

/// The GPU that an entry of CUDA_VISIBLE_DEVICES names: by its place, or by the beginning of its uuid.
Device* find_named(const std::string& entry) {
  char* end = nullptr;
  const long place = std::strtol(entry.c_str(), &end, 10);
  if (end != entry.c_str() && !*end) return place <= INT32_MAX ? find_installed(static_cast<int>(place)) : nullptr;
  return find_installed(find_uuid(entry, installed_count));
}

void show(Device* device) {
  device->ordinal = static_cast<int>(visible_count.load());
  visible[visible_count++] = device;
}

/// CUDA_VISIBLE_DEVICES picks and orders the GPUs, up to the first entry that names none (CUDA programming guide,
/// environment variables); we end at a GPU that is named a second time too.
void pick_visible() {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (size_t i = 0; i < installed_count; ++i) show(&installed[i]);
    return;
  }
  std::istringstream list(text);
  for (std::string entry; std::getline(list, entry, ',');) {
    Device* device = find_named(entry);
    if (!device || device->ordinal >= 0) return;
    show(device);
  }
}

void read_gpus() {
  std::string path;
  try {
    read_devices(variables::text(variables::kGpu), path);
  } catch (const std::exception& reason) {
    std::fprintf(stderr, "oomdiag: no virtual device: %s%s%s\n", path.c_str(), path.empty() ? "" : ": ", reason.what());
    installed_count = 0;
  }
  open_shared_gpus();
}

}  // namespace

const Driver& machine_driver() {
  static const Driver driver = read_driver();
  return driver;
}

int driver_version() {
  const int known = cuda_version_of(machine_driver().branch);
  return known != 0 ? known : CUDA_VERSION;
}

void read_machine() {
  static std::once_flag once;
  std::call_once(once, read_gpus);
}

CUresult initialize_devices() {
  static std::once_flag once;
  if (forked) return CUDA_ERROR_NOT_INITIALIZED;  // before the flag: another thread may have held it at the fork
  std::call_once(once, [] {
    read_machine();
    pick_visible();
    join_shared_gpus();
    initialized = visible_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
    if (is_clocked()) oomdiag_device_note("mode", "clocked");
    if (visible_count && is_integrated(visible[0]->gpu)) {
      oomdiag_device_note("estimate", "memory that is shared with the host: what its programs take is not counted");
    }
    pthread_atfork(nullptr, nullptr, [] { forked = initialized == CUDA_SUCCESS; });
  });
  return initialized;
}

bool is_forked_child() noexcept { return forked; }

CUresult check_initialized() noexcept { return forked ? CUDA_ERROR_NOT_INITIALIZED : initialized.load(); }

int count_devices() noexcept { return static_cast<int>(visible_count); }

Device* find_device(int ordinal) noexcept {
  return ordinal >= 0 && static_cast<size_t>(ordinal) < visible_count ? visible[static_cast<size_t>(ordinal)] : nullptr;
}

Device* find_installed(int index) noexcept {
  return index >= 0 && static_cast<size_t>(index) < installed_count ? &installed[static_cast<size_t>(index)] : nullptr;
}

}  // namespace oomdiag
