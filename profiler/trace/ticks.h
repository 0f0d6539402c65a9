#pragma once

#include <cstdint>

namespace oomdiag {

/// The processor's own counter, as `Event::time` holds it: on x86-64 the time stamp counter, on 64-bit ARM the virtual
/// counter, elsewhere CLOCK_MONOTONIC. All cores count alike. It takes no call into the system.
uint64_t read_ticks() noexcept;

/// How many of them there are in a second, about: to wait by, not to measure by.
uint64_t ticks_per_second() noexcept;

/// CLOCK_MONOTONIC in nanoseconds.
uint64_t monotonic_ns() noexcept;

}  // namespace oomdiag
