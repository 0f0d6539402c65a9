#pragma once

#include <cstdint>

#include "extension/virtual_device/entry_point.h"

// Other processes on the GPU, as OOMDIAG_OTHER_PROCESSES declares them: "pid:name:bytes,…". They hold their bytes of the first
// GPU from the start to the end. It is how a GPU that is not empty is played, for tests and for the question "what if".
// Under WDDM one more is on each GPU: Windows.

/// The simulated process with this index on a GPU, NVML's way; false when there are no more.
OOMDIAG_ENTRY_POINT bool oomdiag_device_simulated_process(int device, unsigned index, unsigned* pid, int64_t* bytes,
                                                          const char** name);

namespace oomdiag {

/// Bytes that simulated processes hold of a GPU, all together.
int64_t simulated_bytes(int device);

}  // namespace oomdiag
