// NVML, as far as PyTorch asks: the part "this process has … in use" of the text of an OOM, torch.cuda's monitoring
// functions, and the question for a fabric of the expandable segments. It must agree with the driver: PyTorch asserts
// on its answers (CUDACachingAllocator.cpp).

#include "extension/virtual_device/nvml/nvml.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/neighbours.h"
#include "extension/virtual_device/driver/uuid.h"

namespace {

// A device's handle is its ordinal plus one: a null handle is none.
int ordinal_of(nvmlDevice_t device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }

int count_devices() {
  int count = 0;
  return cuInit(0) || cuDeviceGetCount(&count) ? 0 : count;
}

nvmlReturn_t give_device(int ordinal, nvmlDevice_t* device) {
  if (ordinal < 0 || ordinal >= count_devices()) return NVML_ERROR_NOT_FOUND;
  *device = reinterpret_cast<nvmlDevice_t>(static_cast<intptr_t>(ordinal) + 1);
  return NVML_SUCCESS;
}

bool is_in_use(nvmlDevice_t device) {
  int active = 0;
  cuDevicePrimaryCtxGetState(ordinal_of(device), nullptr, &active);
  return active;
}

unsigned long long total_bytes(nvmlDevice_t device) {
  size_t bytes = 0;
  cuDeviceTotalMem(&bytes, ordinal_of(device));
  return bytes;
}

unsigned long long used_bytes(nvmlDevice_t device) {
  return static_cast<unsigned long long>(oomdiag_device_used_bytes(ordinal_of(device)));
}

/// This process, and the neighbours that the environment declares.
template <typename Process>
nvmlReturn_t give_processes(nvmlDevice_t device, unsigned* count, Process* processes) {
  const unsigned room = processes ? *count : 0;
  unsigned found = 0;
  int64_t of_others = 0;
  const auto give = [&](unsigned pid, int64_t bytes) {
    if (found < room) processes[found].pid = pid;
    if (found < room) processes[found].usedGpuMemory = static_cast<unsigned long long>(bytes);
    ++found;
  };
  unsigned pid = 0;
  int64_t bytes = 0;
  const char* name = nullptr;
  for (unsigned i = 0; oomdiag_device_neighbour(ordinal_of(device), i, &pid, &bytes, &name); ++i) {
    of_others += bytes;
    give(pid, bytes);
  }
  if (is_in_use(device)) give(static_cast<unsigned>(getpid()), static_cast<int64_t>(used_bytes(device)) - of_others);
  *count = found;
  return found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t give_instances(nvmlDevice_t device, unsigned* count, nvmlProcessInfo_t* processes) {
  const nvmlReturn_t result = give_processes(device, count, processes);
  for (unsigned i = 0; result == NVML_SUCCESS && i < *count; ++i) {
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

int ask(nvmlDevice_t device, CUdevice_attribute attribute) {
  int value = 0;
  cuDeviceGetAttribute(&value, attribute, ordinal_of(device));
  return value;
}

}  // namespace

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlInit_v2() { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlInit() { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlInitWithFlags(unsigned) { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlShutdown() { return NVML_SUCCESS; }
OOMDIAG_ENTRY_POINT const char* nvmlErrorString(nvmlReturn_t code) {
  return code == NVML_SUCCESS ? "Success" : "Not Supported";
}

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  return give(count, static_cast<unsigned>(count_devices()));
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  return give_device(static_cast<int>(index), device);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* text, nvmlDevice_t* device) {
  int ordinal = -1;
  if (count_devices() == 0 || cuDeviceGetByPCIBusId(&ordinal, text)) return NVML_ERROR_NOT_FOUND;
  return give_device(ordinal, device);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  for (int ordinal = 0; ordinal < count_devices(); ++ordinal) {
    if (oomdiag::format_uuid(ordinal) == uuid) return give_device(ordinal, device);
  }
  return NVML_ERROR_NOT_FOUND;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned* index) {
  return give(index, static_cast<unsigned>(ordinal_of(device)));
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* text, unsigned length) {
  return give_text(text, length, oomdiag::format_uuid(ordinal_of(device)).c_str());
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* text, unsigned length) {
  return cuDeviceGetName(text, static_cast<int>(length), ordinal_of(device)) ? NVML_ERROR_INVALID_ARGUMENT
                                                                             : NVML_SUCCESS;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* info) {
  *info = {};
  info->bus = static_cast<unsigned>(ordinal_of(device)) + 1;
  std::snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
  std::snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", info->bus & 0xffu);
  return NVML_SUCCESS;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  *major = ask(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  return give(minor, ask(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
}

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  const auto total = total_bytes(device);
  const auto used = used_bytes(device);
  return give(memory, {.total = total, .free = total - used, .used = used});
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  const auto total = total_bytes(device);
  const auto used = used_bytes(device);
  return give(memory, {.version = memory->version, .total = total, .reserved = 0, .free = total - used, .used = used});
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
  for (unsigned i = 0; oomdiag_device_neighbour(0, i, &known, &bytes, &name); ++i) {
    if (known == pid) return give_text(text, length, name);
  }
  return NVML_ERROR_NOT_FOUND;
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned* count,
                                                                          nvmlProcessInfo_t*) {
  return give(count, 0u);
}

// A card that is idle: nothing heats it.
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
  return give(megahertz, static_cast<unsigned>(ask(device, CU_DEVICE_ATTRIBUTE_CLOCK_RATE)) / 1000);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned* megahertz) {
  return nvmlDeviceGetClockInfo(device, type, megahertz);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned type, unsigned, unsigned* megahertz) {
  return nvmlDeviceGetClockInfo(device, type, megahertz);
}

OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetDriverVersion(char* text, unsigned length) {
  return give_text(text, length, "580.00.00");
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetNVMLVersion(char* text, unsigned length) {
  return give_text(text, length, "13.580.00");
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) { return give(version, CUDA_VERSION); }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) { return give(version, CUDA_VERSION); }

// One card in the machine, linked to nothing, not partitioned.
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
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t, void*) { return NVML_ERROR_NOT_SUPPORTED; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t, void*) { return NVML_ERROR_NOT_SUPPORTED; }
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t, nvmlDevice_t, int, int* status) {
  return give(status, 0);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t, unsigned* current, unsigned* pending) {
  return give(current, *pending = 0);
}
OOMDIAG_ENTRY_POINT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t, int count, nvmlFieldValue_t* values) {
  for (int i = 0; i < count; ++i) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
  return NVML_SUCCESS;
}
