#pragma once

#include <cstdint>

// What the virtual device's driver reports to the recorder about launches (oomdiag_device_set_launch_observer).

/// How often a kernel goes over what it was given a pointer to: loops that take all of it, and what its threads take outside of loops,
/// at most.
struct oomdiag_passes {
  int loops;
  int64_t most_bytes;
};

struct oomdiag_argument {
  const void* at;
  oomdiag_passes reads, writes;
};

/// A launch of a kernel by the driver API, as Triton, CuPy and numba do.
struct oomdiag_launch {
  const char* kernel;
  const oomdiag_argument* arguments;  ///< those through which it reads or writes
  int count;
  bool is_known;  ///< its code says all of what it does; false for one without PTX, or with products
};
