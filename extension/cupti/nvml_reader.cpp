#include "extension/cupti/nvml_reader.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "profiler/trace/format.h"

namespace oomdiag {
namespace {

NvmlLibrary nvml{};

void add_processes(nvmlReturn_t (*list)(nvmlDevice_t, unsigned*, nvmlProcessInfo_t*), nvmlDevice_t gpu,
                   NvmlReading& reading) {
  std::array<nvmlProcessInfo_t, NvmlReading::kMaxProcesses> found{};
  auto count = static_cast<unsigned>(found.size());
  if (list == nullptr || list(gpu, &count, found.data()) != NVML_SUCCESS) return;
  for (unsigned i = 0; i < std::min<size_t>(count, found.size()); ++i) {
    if (reading.lists(found[i].pid) || reading.process_count == reading.processes.size())
      continue;  // a process may be of both lists
    const auto bytes = found[i].usedGpuMemory == NVML_VALUE_NOT_AVAILABLE ? 0 : found[i].usedGpuMemory;
    reading.processes[reading.process_count++] = {found[i].pid, static_cast<int64_t>(bytes)};
  }
}

}  // namespace

void NvmlReader::open() noexcept {
  if (ready_ || !nvml.open()) return;
  ready_ = true;
  unsigned count = 0;
  if (nvml.count == nullptr || nvml.by_index == nullptr || nvml.count(&count) != NVML_SUCCESS) return;
  for (unsigned i = 0; i < std::min<unsigned>(count, kMaxDevices); ++i) {
    nvmlDevice_t gpu = nullptr;
    if (nvml.by_index(i, &gpu) == NVML_SUCCESS) start_[i] = {gpu, nvml.used_on(gpu)};
  }
}

// The driver leaves out and renumbers GPUs (CUDA_VISIBLE_DEVICES), NVML does not: they agree on the address on the bus.
nvmlDevice_t NvmlReader::gpu_of(int device) noexcept {
  if (!ready_ || device < 0 || device >= static_cast<int>(kMaxDevices)) return nullptr;
  nvmlDevice_t& gpu = gpus_[static_cast<size_t>(device)];
  if (gpu != nullptr) return gpu;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  const auto bus_of = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetPCIBusId"));
  char bus[32] = {};
  if (bus_of == nullptr || bus_of(bus, sizeof bus, device) != 0 || nvml.by_bus(bus, &gpu) != NVML_SUCCESS)
    gpu = nullptr;
  return gpu;
}

NvmlReading NvmlReader::read(int device) noexcept {
  NvmlReading reading;
  nvmlDevice_t gpu = gpu_of(device);
  if (gpu == nullptr) return reading;
  reading.used_bytes = nvml.used_on(gpu);
  reading.valid = reading.used_bytes >= 0;
  add_processes(nvml.compute, gpu, reading);
  add_processes(nvml.graphics, gpu, reading);
  return reading;
}

int64_t NvmlReader::used_at_start(int device) noexcept {
  const nvmlDevice_t gpu = gpu_of(device);
  for (const Start& start : start_) {
    if (gpu != nullptr && start.gpu == gpu) return start.used_bytes;
  }
  return -1;
}

void name_process(uint32_t pid, char* name, size_t size) noexcept {
  *name = '\0';
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%u/comm", pid);
  if (std::FILE* file = std::fopen(path, "r")) {
    if (std::fgets(name, static_cast<int>(size), file) != nullptr) name[std::strcspn(name, "\n")] = '\0';
    std::fclose(file);
  }
  char whole[256] = {};
  if (*name != '\0' || nvml.process_name == nullptr || nvml.process_name(pid, whole, sizeof whole) != NVML_SUCCESS)
    return;
  const std::string_view text(whole, strnlen(whole, sizeof whole));
  std::snprintf(name, size, "%s", whole + (text.rfind('/') == text.npos ? 0 : text.rfind('/') + 1));
}

}  // namespace oomdiag
