#pragma once

#include <array>
#include <optional>

#include "profiler/explain/facts/facts.h"
#include "profiler/explain/facts/imbalance.h"
#include "profiler/explain/findings.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Bytes of each category in `moment`, indexed by Category.
std::array<int64_t, kCategoryCount> sum_categories(const MemoryState& state);

/// What is known of a run besides its events.
struct ExplainInputs {
  AllocatorSettings settings{};
  Device device{};                       ///< that fixes and batches are judged by
  std::optional<int64_t> batch{};        ///< nullopt: where the run fits it is inferred from the shapes of tensors
  bool total_is_known = true;            ///< false: of a snapshot, which does not record the size of its device
  std::optional<Imbalance> imbalance{};  ///< between the devices of the program
};

/// Whether the program caught an OOM of this device and went on.
bool has_caught(const DeviceHistory& device);

/// Explains one device of a replayed run.
Findings explain(const DeviceHistory& device, const ExplainInputs& inputs);

/// What private pools (MemPools, CUDA graphs) cache besides that of the pool `asked`. It serves no other pool, on a larger
/// device neither: before a request fails the allocator frees the caches of pools that nobody uses any more. Where no
/// request failed those are among them.
int64_t private_pool_cached_bytes(const MemoryState& state, uint8_t asked);

/// The cause that `facts` decide, with what only the state of the device shows.
Cause find_cause(const FailureFacts& facts, const MemoryState& state);

/// How well the bytes in use fill the reserved ones.
Packing measure_packing(const MemoryState& state, int64_t total_bytes);

/// The segments whose holes are largest but cannot be given back, and what pins them.
std::vector<BlockedSegment> find_blocked_segments(const MemoryState& state, size_t at_most);

}  // namespace oomdiag
