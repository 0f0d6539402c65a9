#pragma once

#include <cstdint>

#include "profiler/explain/step/what_if.h"
#include "profiler/replay/allocator/settings.h"

namespace oomdiag {

/// Whether PyTorch's caching allocator would get through the step in `available_bytes` of the GPU, free blocks and whole segments
/// included: a step whose bytes fit may still fail. It runs twice: as the first one, which makes gradients and optimizer state
/// in between everything else, and as a later one. One stream; steps of more than kMaxSimulated blocks are judged by bytes.
bool simulate_fits(const Allocations& blocks, int64_t available_bytes, const AllocatorSettings& settings);

inline constexpr size_t kMaxSimulated = 50'000;

/// Whether the step gets through without the last sixty-fourth of the room: no prediction is as exact.
bool simulate_fits_with_margin(const Allocations& blocks, int64_t available_bytes, const AllocatorSettings& settings);

}  // namespace oomdiag
