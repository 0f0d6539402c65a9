// New blocks forget. A block that the caching allocator hands out may have held what the host wrote for its last owner;
// here the driver is notified, so that a size that no kernel computed reads as zero and not as somebody else's number.
// A library of its own: it needs torch, which the mocks do not, and must hold with no recorder loaded. The runtime
// loads it (runtime/forgetting.cpp).

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <exception>

#include "extension/torch_version.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/torch/compute.h"
#include "extension/virtual_device/torch/rest.h"

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// Runs inside the allocator, under its lock: no torch, no throw.
void on_trace(const allocator::TraceEntry& entry) noexcept {
  if (entry.action_ != allocator::TraceEntry::Action::ALLOC) return;
  oomdiag_device_forget(reinterpret_cast<void*>(entry.addr_), entry.size_);
}

}  // namespace

/// Attaches itself once the allocator is ready: 0 not yet, 1 done, -1 never (another torch, another allocator).
OOMDIAG_ENTRY_POINT int oomdiag_forget_poll() noexcept try {
  static const bool fits = oomdiag::minor_version(oomdiag::loaded_torch_version()) == OOMDIAG_TORCH_MINOR;
  static std::atomic<bool> is_attached = false;
  if (!fits) return -1;
  auto* current = allocator::allocator.load();
  if (!current || !current->initialized()) return 0;
  if (is_attached.exchange(true)) return 1;
  allocator::attachAllocatorTraceTracker(on_trace);
  oomdiag::start_computing();
  oomdiag::rest_before_interpreter_shutdown();
  return 1;
} catch (const std::exception&) {
  return -1;
}
