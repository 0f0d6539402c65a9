#include "extension/virtual_device/driver/memory_account.h"

#include <algorithm>

#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/driver/shared_gpus.h"
#include "extension/virtual_device/driver/simulated_processes.h"

namespace oomdiag {
namespace {

int64_t held_by_others(int index) noexcept { return count_bytes_of_others(index) + simulated_bytes(index); }

}  // namespace

MemoryLock& memory_lock() noexcept {
  static auto& lock = *new MemoryLock;
  return lock;
}

bool charge(Device& device, int64_t bytes) noexcept {
  const SharedGpusLock guard;
  if (bytes > capacity_of(device) - held_by_others(device.index) - device.held_bytes) return false;
  publish_own_bytes(device.index, device.held_bytes += bytes);
  return true;
}

void refund(Device& device, int64_t bytes) noexcept { publish_own_bytes(device.index, device.held_bytes -= bytes); }

int64_t capacity_of(const Device& device) noexcept { return device.gpu.total_bytes + machine_driver().host_bytes; }

int64_t count_used_bytes(const Device& device) noexcept {
  return std::min(device.held_bytes + held_by_others(device.index), device.gpu.total_bytes);
}

int64_t count_free_bytes(const Device& device) noexcept { return device.gpu.total_bytes - count_used_bytes(device); }

}  // namespace oomdiag
