#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <type_traits>

// The part of NVML that the recorder calls and the virtual device answers; the wheels bring no nvml.h. Names, numbers and
// layouts are those of NVIDIA's public "NVML API Reference", versions of CUDA 13.

using nvmlDevice_t = struct nvmlDevice_st*;

enum nvmlReturn_t {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};

struct nvmlMemory_t {
  unsigned long long total, free, used;
};
struct nvmlMemory_v2_t {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

/// What the unversioned query fills.
struct nvmlProcessInfo_v1_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
};
/// Where a process' memory is not known.
inline constexpr unsigned long long NVML_VALUE_NOT_AVAILABLE = ~0ull;

/// What versions 2 and 3 fill.
struct nvmlProcessInfo_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId;
  unsigned computeInstanceId;
};

struct nvmlTemperature_t {
  unsigned version;
  unsigned sensorType;
  int temperature;
};
struct nvmlUtilization_t {
  unsigned gpu, memory;
};
struct nvmlPciInfo_t {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
};
/// Whether the GPU belongs to a fabric of many hosts (NVLink across hosts); a state of 0 is NVML_GPU_FABRIC_STATE_NOT_SUPPORTED.
struct nvmlGpuFabricInfo_t {
  unsigned char clusterUuid[16];
  nvmlReturn_t status;
  unsigned cliqueId;
  unsigned char state;
};
/// The versioned form: its caller writes the version, whose lower 24 bits are the struct's size. Version 2 ends with
/// healthMask, version 3 with healthSummary.
struct nvmlGpuFabricInfoV_t {
  unsigned version;
  unsigned char clusterUuid[16];
  nvmlReturn_t status;
  unsigned cliqueId;
  unsigned char state;
  unsigned healthMask;
  unsigned char healthSummary;
};
struct nvmlFieldValue_t {
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  int valueType;
  nvmlReturn_t nvmlReturn;
  unsigned long long value;
};

namespace oomdiag {

/// The driver's NVML: functions that it does not have are null.
struct NvmlLibrary {
  nvmlReturn_t (*count)(unsigned*) = nullptr;
  nvmlReturn_t (*by_index)(unsigned, nvmlDevice_t*) = nullptr;
  nvmlReturn_t (*by_bus)(const char*, nvmlDevice_t*) = nullptr;
  nvmlReturn_t (*memory)(nvmlDevice_t, nvmlMemory_t*) = nullptr;
  nvmlReturn_t (*compute)(nvmlDevice_t, unsigned*, nvmlProcessInfo_t*) = nullptr;
  nvmlReturn_t (*graphics)(nvmlDevice_t, unsigned*, nvmlProcessInfo_t*) = nullptr;
  nvmlReturn_t (*process_name)(unsigned, char*, unsigned) = nullptr;
  nvmlReturn_t (*driver_version)(char*, unsigned) = nullptr;

  /// Loads and initializes it. False where it is not there, or cannot say how much of a GPU is taken.
  bool open() noexcept {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const auto find = [library](auto& function, const char* name) {
      using Function = std::remove_reference_t<decltype(function)>;
      if (function == nullptr) function = reinterpret_cast<Function>(dlsym(library, name));
    };
    nvmlReturn_t (*init)() = nullptr;
    find(init, "nvmlInit_v2");
    find(count, "nvmlDeviceGetCount_v2");
    find(by_index, "nvmlDeviceGetHandleByIndex_v2");
    find(by_bus, "nvmlDeviceGetHandleByPciBusId_v2");
    find(memory, "nvmlDeviceGetMemoryInfo");
    find(compute, "nvmlDeviceGetComputeRunningProcesses_v3");
    find(compute, "nvmlDeviceGetComputeRunningProcesses_v2");
    find(graphics, "nvmlDeviceGetGraphicsRunningProcesses_v3");
    find(graphics, "nvmlDeviceGetGraphicsRunningProcesses_v2");
    find(process_name, "nvmlSystemGetProcessName");
    find(driver_version, "nvmlSystemGetDriverVersion");
    return init != nullptr && by_bus != nullptr && memory != nullptr && init() == NVML_SUCCESS;
  }

  /// The bytes taken of the GPU by all processes; -1 where NVML does not say.
  int64_t used_on(nvmlDevice_t gpu) const noexcept {
    nvmlMemory_t taken{};
    return memory(gpu, &taken) == NVML_SUCCESS ? static_cast<int64_t>(taken.used) : -1;
  }
};

}  // namespace oomdiag
