// What is in the memory of a card that has none: see memory.h. Kernels do nothing, so only what the host wrote could be
// read back, and only with OOMDIAG_CONTENTS=1; anything else reads as zeros.

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"

namespace oomdiag {
namespace {

// Above these sizes contents are bulk data, which no program branches on: copying them would cost host memory and time.
constexpr size_t kMostDeviceBytes = 64 << 20;
constexpr size_t kMostHostBytes = size_t{4} << 30;
constexpr size_t kHostPage = 4096;

struct Place {
  bool is_device = false;
  bool is_accessible = true;  // by the host, that is by us
};

Place look_at(const void* address) {
  const auto range = find_range(address);
  const bool is_device = range && range->kind == MemoryKind::device;
  return {.is_device = is_device, .is_accessible = !is_device || keeps_contents()};
}

/// Zeros `bytes`; whole pages are handed back to the system, where zeros cost nothing.
void clear(void* to, size_t bytes) {
  auto* begin = static_cast<char*>(to);
  auto* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHostPage - 1) / kHostPage * kHostPage);
  auto* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(begin + bytes) / kHostPage * kHostPage);
  if (bytes < 16 * kHostPage) {
    std::memset(to, 0, bytes);
    return;
  }
  std::memset(begin, 0, static_cast<size_t>(first - begin));
  std::memset(last, 0, static_cast<size_t>(begin + bytes - last));
  madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED);
}

}  // namespace
}  // namespace oomdiag

void oomdiag_device_copy(void* to, const void* from, size_t bytes) {
  if (!bytes || bytes > oomdiag::kMostHostBytes) return;
  const auto target = oomdiag::look_at(to);
  const auto source = oomdiag::look_at(from);
  if (!target.is_accessible) return;
  if (target.is_device && source.is_device && bytes > oomdiag::kMostDeviceBytes) return;
  if (source.is_accessible) {
    std::memmove(to, from, bytes);
  } else {
    std::memset(to, 0, bytes);
  }
}

void oomdiag_device_fill(void* to, int value, size_t bytes) {
  const auto target = oomdiag::look_at(to);
  if (!bytes || !target.is_accessible) return;
  if (target.is_device && value == 0) {
    oomdiag::clear(to, bytes);
  } else if (!target.is_device || bytes <= oomdiag::kMostDeviceBytes) {
    std::memset(to, value, bytes);
  }
}

void oomdiag_device_forget(void* block, size_t bytes) {
  const auto target = oomdiag::look_at(block);
  if (target.is_device && target.is_accessible) oomdiag::clear(block, bytes);
}
