#include "extension/virtual_device/driver/cudnn_description.h"

#include <cuda.h>

#include <nlohmann/json.hpp>

#include "extension/virtual_device/device_files/gpu.h"

namespace oomdiag {

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

}  // namespace oomdiag
