#include "extension/virtual_device/driver/locks.h"

#include <array>
#include <cstdio>
#include <cstdlib>

namespace {

/// How many locks of each rank this thread has.
thread_local std::array<int, std::size(oomdiag::kLockNames)> held{};

}  // namespace

void oomdiag_device_check_lock(oomdiag::LockRank rank, bool is_recursive) noexcept {
  const auto requested = static_cast<size_t>(rank);
  const bool has_it = is_recursive && held[requested] > 0;
  for (size_t other = requested; other < held.size() && !has_it; ++other) {
    if (held[other] == 0) continue;
    std::fprintf(stderr, "oomdiag: locks out of order: %s is taken under %s (driver/locks.h)\n",
                 oomdiag::kLockNames[requested].data(), oomdiag::kLockNames[other].data());
    std::abort();
  }
  ++held[requested];
}

void oomdiag_device_leave_lock(oomdiag::LockRank rank) noexcept { --held[static_cast<size_t>(rank)]; }
