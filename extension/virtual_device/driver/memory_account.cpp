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

int64_t MemoryAccount::held() const noexcept {
  int64_t sum = 0;
  for (const auto& bytes : held_) sum += bytes.load();
  return sum;
}

MemoryLock& memory_lock() noexcept {
  static auto& lock = *new MemoryLock;
  return lock;
}

bool charge(Device& device, Holder holder, int64_t bytes) noexcept {
  const SharedGpusLock guard;
  MemoryAccount& account = device.account;
  if (bytes > capacity_of(device) - held_by_others(device.index) - account.held()) return false;
  account.held_[static_cast<size_t>(holder)] += bytes;
  publish_own_bytes(device.index, account.held());
  return true;
}

void refund(Device& device, Holder holder, int64_t bytes) noexcept {
  device.account.held_[static_cast<size_t>(holder)] -= bytes;
  publish_own_bytes(device.index, device.account.held());
}

int64_t capacity_of(const Device& device) noexcept { return device.gpu.total_bytes + machine_driver().host_bytes; }

int64_t count_used_bytes(const Device& device) noexcept {
  return std::min(device.account.held() + held_by_others(device.index), device.gpu.total_bytes);
}

int64_t count_free_bytes(const Device& device) noexcept { return device.gpu.total_bytes - count_used_bytes(device); }

}  // namespace oomdiag
