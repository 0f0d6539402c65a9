#include "extension/virtual_device/driver/launch_observer.h"

#include <atomic>
#include <cstdint>
#include <vector>

#include "extension/launches.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/host_memory.h"
#include "extension/virtual_device/driver/kernel_traffic.h"
#include "extension/virtual_device/driver/module.h"

namespace oomdiag {
namespace {

std::atomic<void (*)(const oomdiag_launch*)> observer = nullptr;

const KernelTraffic* traffic_of(const Kernel& kernel) {
  if (!kernel.module) return nullptr;
  const auto found = kernel.module->code.traffic.find(kernel.name);
  return found == kernel.module->code.traffic.end() ? nullptr : &found->second;
}

oomdiag_passes in_all_threads(const Passes& passes, double threads) {
  return {.loops = passes.loops,
          .most_bytes = static_cast<int64_t>(static_cast<double>(passes.bytes_of_thread) * threads)};
}

/// What each argument points to that the kernel reads or writes.
std::vector<oomdiag_argument> pointers_of(const KernelTraffic& traffic, double threads, void* const* arguments) {
  std::vector<oomdiag_argument> pointers;
  for (size_t i = 0; i < traffic.arguments.size(); ++i) {
    const oomdiag_passes reads = in_all_threads(traffic.arguments[i].reads, threads);
    const oomdiag_passes writes = in_all_threads(traffic.arguments[i].writes, threads);
    const void* at = nullptr;
    if (reads.loops + reads.most_bytes + writes.loops + writes.most_bytes == 0) continue;
    if (read_safely(&at, arguments[i], sizeof at)) pointers.push_back({.at = at, .reads = reads, .writes = writes});
  }
  return pointers;
}

}  // namespace

bool launches_are_watched() noexcept { return observer.load() != nullptr; }

void notify_launch(CUfunction handle, double threads, void* const* arguments) noexcept try {
  const auto notify = observer.load();
  const Kernel* kernel = notify ? known_kernel(handle) : nullptr;
  if (!kernel) return;
  const KernelTraffic* traffic = arguments ? traffic_of(*kernel) : nullptr;
  const auto pointers = traffic ? pointers_of(*traffic, threads, arguments) : std::vector<oomdiag_argument>{};
  const oomdiag_launch launch{.kernel = kernel->name.c_str(),
                              .arguments = pointers.data(),
                              .count = static_cast<int>(pointers.size()),
                              .is_known = traffic && traffic->is_complete && !traffic->computes_products};
  notify(&launch);
} catch (...) {
}

}  // namespace oomdiag

void oomdiag_device_set_launch_observer(void (*on_launch)(const oomdiag_launch*)) {
  oomdiag::observer.store(on_launch);
}
