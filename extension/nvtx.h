#pragma once

namespace oomdiag {

/// Begins a range of this thread, or with a null name ends its innermost one.
using RangeFunction = void (*)(const char* name);

/// From now on each beginning and end of an NVTX range calls `record`. Any thread.
void record_nvtx_ranges(RangeFunction record) noexcept;

}  // namespace oomdiag
