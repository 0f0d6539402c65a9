#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>

#include "extension/launches.h"
#include "extension/record/allocator_api.h"
#include "extension/record/work_meter.h"

namespace oomdiag {
namespace {

/// Bytes of the allocator's blocks by where they begin.
class LiveBlocks {
 public:
  void add(uint64_t address, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_[address] = bytes;
  }
  void remove(uint64_t address) {
    const std::lock_guard lock(mutex_);
    blocks_.erase(address);
  }
  /// From there to the end of its block: a view may have less. 0 for what is in none.
  int64_t bytes_from(uint64_t address) {
    const std::lock_guard lock(mutex_);
    auto block = blocks_.upper_bound(address);
    if (block == blocks_.begin()) return 0;
    --block;
    return std::max<int64_t>(0, block->second - static_cast<int64_t>(address - block->first));
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, int64_t> blocks_;
};
LiveBlocks& live_blocks() {
  static auto* const instance = new LiveBlocks;  // kernels may be launched until the very end
  return *instance;
}

// Under the allocator's lock. A program that is metered may be slow, and what fails here is the map: a block is then not counted.
void note_block(const allocator::TraceEntry& entry) noexcept try {
  using enum allocator::TraceEntry::Action;
  if (entry.action_ == ALLOC) live_blocks().add(entry.addr_, static_cast<int64_t>(entry.size_));
  if (entry.action_ == FREE_COMPLETED) live_blocks().remove(entry.addr_);
} catch (...) {
}

int64_t bytes_of(const oomdiag_passes& passes, int64_t of_tensor) {
  return passes.loops * of_tensor + std::min(passes.most_bytes, of_tensor);
}

void meter_launch(const oomdiag_launch* launch) {
  int64_t read = 0, written = 0;
  for (int i = 0; i < launch->count; ++i) {
    const oomdiag_argument& argument = launch->arguments[i];
    const int64_t of_tensor = live_blocks().bytes_from(reinterpret_cast<uint64_t>(argument.at));
    read += bytes_of(argument.reads, of_tensor);
    written += bytes_of(argument.writes, of_tensor);
  }
  meter_kernel(launch->kernel, read, written, launch->is_known);
}

}  // namespace

void start_launch_meter() {
  using Observer = void (*)(const oomdiag_launch*);
  const auto set = reinterpret_cast<void (*)(Observer)>(dlsym(RTLD_DEFAULT, "oomdiag_device_set_launch_observer"));
  if (set == nullptr) return;
  allocator::attachAllocatorTraceTracker(note_block);
  set(meter_launch);
}

}  // namespace oomdiag
