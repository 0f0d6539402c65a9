#pragma once

#include <cuda.h>

namespace oomdiag {

/// Whether somebody is told of launches (oomdiag_device_set_launch_observer): then what code says of traffic is read.
bool launches_are_watched() noexcept;

/// Tells of one with so many threads. `arguments` as for cuLaunchKernel.
void tell_of_launch(CUfunction kernel, double threads, void* const* arguments) noexcept;

}  // namespace oomdiag
