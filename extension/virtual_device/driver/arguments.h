#pragma once

namespace oomdiag {

/// What a kernel was given pointers to is no longer known, unless the operator that launches it says what it writes
/// (oomdiag_device_set_known_kernels). `arguments` as for cuLaunchKernel; how many there are is not known.
void forget_arguments(void* const* arguments) noexcept;

}  // namespace oomdiag
