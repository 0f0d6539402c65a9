#include "extension/virtual_device/driver/card.h"

#include <cuda.h>

#include <nlohmann/json.hpp>

namespace oomdiag {

std::string describe_for_cudnn(const Card& card) {
  return nlohmann::json{{"deviceVer", card.compute_major * 100 + card.compute_minor * 10},
                        {"multiProcessorCount", card.multiprocessors},
                        {"warpSize", 32},
                        {"maxSharedMemoryPerBlock", card.shared_bytes_per_block},
                        {"maxSharedMemoryPerBlockOptin", card.shared_bytes_per_block_optin},
                        {"reservedSharedMemoryPerBlock", card.reserved_shared_bytes_per_block},
                        {"maxRegistersPerSM", card.registers_per_multiprocessor},
                        {"maxCtasPerSM", card.blocks_per_multiprocessor},
                        {"maxThreadsPerBlock", 1024},
                        {"maxThreadsPerSM", card.threads_per_multiprocessor},
                        {"regsPerBlock", 65536},
                        {"totalGlobalMem", card.total_bytes},
                        {"smClockRateKHz", card.clock_khz},
                        {"l2CacheSize", card.l2_bytes},
                        {"maxBlockSize", {1024, 1024, 64}},
                        {"memClockRateKHz", card.memory_clock_khz},
                        {"maxGridSize", {2147483647, 65535, 65535}},
                        {"supportCoopLaunch", 1},
                        {"pciDeviceId", 0},
                        {"isTccDriver", 0},
                        {"cudaDeviceId", 0},
                        {"driverVer", CUDA_VERSION},
                        {"deviceName", card.name}}
      .dump();
}

}  // namespace oomdiag
