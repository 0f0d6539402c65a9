#include "extension/virtual_device/driver/ledger.h"

#include <algorithm>

#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/shared_gpus.h"
#include "extension/virtual_device/driver/simulated_processes.h"

namespace oomdiag {
namespace {

int64_t held_by_others(int index) noexcept { return count_bytes_of_others(index) + simulated_bytes(index); }

}  // namespace

int64_t Ledger::held() const noexcept {
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
  Ledger& ledger = device.ledger;
  if (bytes > device.gpu.total_bytes - held_by_others(device.index) - ledger.held()) return false;
  ledger.held_[static_cast<size_t>(holder)] += bytes;
  publish_own_bytes(device.index, ledger.held());
  return true;
}

void refund(Device& device, Holder holder, int64_t bytes) noexcept {
  device.ledger.held_[static_cast<size_t>(holder)] -= bytes;
  publish_own_bytes(device.index, device.ledger.held());
}

int64_t count_used_bytes(const Device& device) noexcept {
  return std::min(device.ledger.held() + held_by_others(device.index), device.gpu.total_bytes);
}

int64_t count_free_bytes(const Device& device) noexcept { return device.gpu.total_bytes - count_used_bytes(device); }

}  // namespace oomdiag
