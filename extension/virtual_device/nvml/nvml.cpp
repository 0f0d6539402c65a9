// NVML, as far as PyTorch asks: the part "this process has … in use" of the text of an OOM, torch.cuda's monitoring
// functions, and the question for a fabric of the expandable segments. It must agree with the driver: PyTorch asserts
// on its answers (CUDACachingAllocator.cpp).

#include "extension/nvml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/simulated_processes.h"
#include "extension/virtual_device/driver/uuid.h"
#include "extension/virtual_device/entry_point.h"

namespace {

// A device's handle is its place in the machine plus one: a null handle is none. CUDA_VISIBLE_DEVICES hides nothing here.
int index_of(nvmlDevice_t device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }

oomdiag_gpu describe(int index) {
  oomdiag_gpu gpu{};
  oomdiag_device_describe(index, &gpu);
  return gpu;
}
oomdiag_gpu describe(nvmlDevice_t device) { return describe(index_of(device)); }

int count_gpus() {
  int count = 0;
  while (describe(count).name) ++count;
  return count;
}

nvmlReturn_t give_device(int index, nvmlDevice_t* device) {
  if (!describe(index).name) return NVML_ERROR_NOT_FOUND;
  *device = reinterpret_cast<nvmlDevice_t>(static_cast<intptr_t>(index) + 1);
  return NVML_SUCCESS;
}

int branch() {
  constexpr int kOfCuda13 = 580;
  const int named = oomdiag_device_driver_branch();
  return named != 0 ? named : kOfCuda13;
}

int cuda_version() {
  int version = 0;
  cuDriverGetVersion(&version);
  return version;
}

unsigned long long bytes(int64_t count) { return static_cast<unsigned long long>(count); }

template <typename Process>
nvmlReturn_t give_processes(nvmlDevice_t device, unsigned* count, Process* processes) {
  const unsigned capacity = *count;
  const int known = oomdiag_device_processes(index_of(device), nullptr, nullptr, 0);
  std::vector<int> pids(static_cast<size_t>(known));
  std::vector<int64_t> held(static_cast<size_t>(known));
  const int found = oomdiag_device_processes(index_of(device), pids.data(), held.data(), known);
  *count = static_cast<unsigned>(std::min(found, known));  // others may have begun or ended meanwhile
  if (*count == 0) return NVML_SUCCESS;
  if (capacity < *count || !processes) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < *count; ++i) {
    processes[i].pid = static_cast<unsigned>(pids[i]);
    processes[i].usedGpuMemory = bytes(held[i]);
  }
  return NVML_SUCCESS;
}

nvmlReturn_t give_instances(nvmlDevice_t device, unsigned* count, nvmlProcessInfo_t* processes) {
  const nvmlReturn_t result = give_processes(device, count, processes);
  for (unsigned i = 0; result == NVML_SUCCESS && processes && i < *count; ++i) {
    processes[i].gpuInstanceId = processes[i].computeInstanceId = ~0u;  // no MIG
  }
  return result;
}

template <typename Value>
nvmlReturn_t give(Value* place, Value value) {
  *place = value;
  return NVML_SUCCESS;
}

nvmlReturn_t give_text(char* place, unsigned length, const char* text) {
  std::snprintf(place, length, "%s", text);
  return NVML_SUCCESS;
}

}  // namespace

/// What every generated stub of this library does.
extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return NVML_ERROR_NOT_SUPPORTED;
}

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlInit_v2() { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlInit() { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlInitWithFlags(unsigned) { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlShutdown() { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT const char* nvmlErrorString(nvmlReturn_t code) {
  return code == NVML_SUCCESS ? "Success" : "Not Supported";
}

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  return give(count, static_cast<unsigned>(count_gpus()));
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  return give_device(static_cast<int>(index), device);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* text, nvmlDevice_t* device) {
  unsigned domain = 0;
  unsigned bus = 0;
  if (std::sscanf(text, "%x:%x", &domain, &bus) != 2) return NVML_ERROR_INVALID_ARGUMENT;
  return give_device(static_cast<int>(bus) - 1, device);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  return give_device(oomdiag::find_uuid(uuid, static_cast<size_t>(count_gpus())), device);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned* index) {
  return give(index, static_cast<unsigned>(index_of(device)));
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* text, unsigned length) {
  return give_text(text, length, oomdiag::format_uuid(index_of(device)).c_str());
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* text, unsigned length) {
  const char* name = describe(device).name;
  return name ? give_text(text, length, name) : NVML_ERROR_INVALID_ARGUMENT;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* info) {
  *info = {};
  info->bus = static_cast<unsigned>(index_of(device)) + 1;
  std::snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
  std::snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", info->bus & 0xffu);
  return NVML_SUCCESS;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  *major = describe(device).compute_major;
  return give(minor, describe(device).compute_minor);
}

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  const oomdiag_gpu gpu = describe(device);
  return give(memory, {.total = bytes(gpu.total_bytes),
                       .free = bytes(gpu.total_bytes - gpu.used_bytes),
                       .used = bytes(gpu.used_bytes)});
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  const oomdiag_gpu gpu = describe(device);
  return give(memory, {.version = memory->version,
                       .total = bytes(gpu.total_bytes),
                       .reserved = 0,
                       .free = bytes(gpu.total_bytes - gpu.used_bytes),
                       .used = bytes(gpu.used_bytes)});
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned* count,
                                                                      nvmlProcessInfo_v1_t* processes) {
  return give_processes(device, count, processes);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned* count,
                                                                         nvmlProcessInfo_t* processes) {
  return give_instances(device, count, processes);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned* count,
                                                                         nvmlProcessInfo_t* processes) {
  return give_instances(device, count, processes);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char* text, unsigned length) {
  unsigned known = 0;
  int64_t bytes = 0;
  const char* name = nullptr;
  for (unsigned i = 0; oomdiag_device_simulated_process(0, i, &known, &bytes, &name); ++i) {
    if (known == pid) return give_text(text, length, name);
  }
  return NVML_ERROR_NOT_FOUND;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned* count,
                                                                          nvmlProcessInfo_t*) {
  return give(count, 0u);
}

// A GPU that is idle: nothing heats it.
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t, unsigned, unsigned* degrees) {
  return give(degrees, 35u);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t, nvmlTemperature_t* temperature) {
  return give(&temperature->temperature, 35);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t, unsigned* milliwatts) {
  return give(milliwatts, 75000u);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t, nvmlUtilization_t* rates) {
  return give(rates, {.gpu = 0, .memory = 0});
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned, unsigned* megahertz) {
  return give(megahertz, static_cast<unsigned>(describe(device).clock_khz) / 1000);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned* megahertz) {
  return nvmlDeviceGetClockInfo(device, type, megahertz);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned type, unsigned, unsigned* megahertz) {
  return nvmlDeviceGetClockInfo(device, type, megahertz);
}

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetDriverVersion(char* text, unsigned length) {
  return give_text(text, length, (std::to_string(branch()) + ".00.00").c_str());
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetNVMLVersion(char* text, unsigned length) {
  return give_text(text, length,
                   (std::to_string(cuda_version() / 1000) + "." + std::to_string(branch()) + ".00").c_str());
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return give(version, cuda_version());
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) { return give(version, cuda_version()); }

// GPUs that are not partitioned. Which links they have is not reported, and whom they reach is what CUDA says, too.
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t, unsigned, int*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t, unsigned, int*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t, unsigned, nvmlPciInfo_t*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t, unsigned, int, unsigned*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
// The GPUs of one host: in no fabric. PyTorch 2.13 asserts that the question itself succeeds.
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t, nvmlGpuFabricInfo_t* info) {
  return give(info, {});
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t, nvmlGpuFabricInfoV_t* info) {
  const size_t size = info->version & 0xFFFFFFu;
  if (size < offsetof(nvmlGpuFabricInfoV_t, healthSummary) || size > sizeof *info) {
    return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  }
  constexpr size_t head = sizeof info->version;
  std::memset(reinterpret_cast<char*>(info) + head, 0, size - head);
  return NVML_SUCCESS;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other, int what,
                                                        int* status) {
  constexpr int kOk = 0, kNotSupported = 5, kNvLink = 2;  // nvmlGpuP2PStatus_t, nvmlGpuP2PCapsIndex_t
  const oomdiag_gpu gpu = describe(device);
  const oomdiag_gpu peer = describe(other);
  if (!gpu.name || !peer.name) return NVML_ERROR_INVALID_ARGUMENT;
  const bool are_alike = device != other && !std::strcmp(gpu.name, peer.name);
  return give(status, are_alike && (what == kNvLink ? gpu.is_linked : gpu.has_peers) ? kOk : kNotSupported);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t, unsigned* current, unsigned* pending) {
  return give(current, *pending = 0);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t, int count, nvmlFieldValue_t* values) {
  for (int i = 0; i < count; ++i) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
  return NVML_SUCCESS;
}
