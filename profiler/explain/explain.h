#pragma once

#include <array>
#include <optional>

#include "profiler/explain/findings.h"

namespace oomdiag {

/// Bytes of each category in `moment`, indexed by Category.
std::array<int64_t, kCategoryCount> sum_categories(const Moment& moment);

/// Explains one card of a replayed run. `batch` is the batch size of the run, where the caller knows it.
Findings explain(const DeviceHistory& device, const AllocatorSettings& settings, int64_t total_bytes,
                 int64_t context_bytes, std::optional<int64_t> batch);

/// The primary cause of a refusal, decided from the state it happened in. `context_bytes`: what a context is known to take.
/// `growths`: what grew from step to step before it.
Cause find_cause(const OutOfMemory& failure, const Moment& moment, const AllocatorSettings& settings,
                 int64_t total_bytes, int64_t context_bytes, const std::vector<Growth>& growths = {});

/// How well the bytes in use fill the reserved ones.
Packing measure_packing(const Moment& moment, int64_t total_bytes);

/// The segments whose holes are largest but cannot be given back, and what pins them.
std::vector<PinnedSegment> find_pinned_holes(const Moment& moment, size_t at_most);

}  // namespace oomdiag
