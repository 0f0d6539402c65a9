#include "profiler/trace/ticks.h"

#ifdef __x86_64__
#include <x86intrin.h>
#endif

#include <ctime>

namespace oomdiag {

uint64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

#if defined(__x86_64__)

uint64_t read_ticks() noexcept { return __rdtsc(); }

uint64_t ticks_per_second() noexcept { return 3'000'000'000; }

#elif defined(__aarch64__)

// Linux lets programs read it. It counts with 1 GHz from ARMv8.6 on, with 25 MHz and more before: equal times are common
// there, and nothing is ordered by them.
uint64_t read_ticks() noexcept {
  uint64_t ticks = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
}

uint64_t ticks_per_second() noexcept {
  uint64_t frequency = 0;
  asm("mrs %0, cntfrq_el0" : "=r"(frequency));
  return frequency;
}

#else

uint64_t read_ticks() noexcept { return monotonic_ns(); }

uint64_t ticks_per_second() noexcept { return 1'000'000'000; }

#endif

}  // namespace oomdiag
