#pragma once

#include <atomic>

// What a mapped file holds is read by other processes. x86-64 keeps the order of stores, and of loads, so that only the
// compiler must; 64-bit ARM keeps neither. (Not atomic_thread_fence: ThreadSanitizer knows none, and on ARM it orders more.)

namespace oomdiag {

/// Who sees a store after it sees those before it, too.
inline void order_stores() noexcept {
#ifdef __aarch64__
  asm volatile("dmb ishst" ::: "memory");
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

/// Loads after it see what those before it saw, or newer.
inline void order_loads() noexcept {
#ifdef __aarch64__
  asm volatile("dmb ishld" ::: "memory");
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace oomdiag
