#pragma once

#include <cuda.h>

namespace oomdiag {

/// Whether launches have an observer (oomdiag_device_set_launch_observer): then the traffic of kernels is read from their code.
bool launches_are_watched() noexcept;

/// Notifies it of one with so many threads. `arguments` as for cuLaunchKernel.
void notify_launch(CUfunction kernel, double threads, void* const* arguments) noexcept;

}  // namespace oomdiag
