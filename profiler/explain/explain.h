#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "profiler/explain/findings.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Bytes of each category in `moment`, indexed by Category.
std::array<int64_t, kCategoryCount> sum_categories(const Moment& moment);

/// What is known of a run besides its events.
struct ExplainInputs {
  AllocatorSettings settings{};
  Device device{};                 ///< that fixes and batches are judged by
  std::optional<int64_t> batch{};  ///< nullopt: where the run fits it is inferred from the shapes of tensors
};

/// Explains one device of a replayed run.
Findings explain(const DeviceHistory& device, const ExplainInputs& inputs);

/// What private pools (MemPools, CUDA graphs) cache besides that of the pool `asked`. It serves no other pool, on a larger
/// device neither: before a request fails the allocator frees the caches of pools that nobody uses any more. Where no
/// request failed those are among them.
int64_t private_pool_cached_bytes(const Moment& moment, uint8_t asked);

/// What the step that failed needs of the card from its beginning to its end.
struct StepNeed {
  int64_t bytes = 0;        ///< allocated at once; 0: not known
  bool whole = false;       ///< a whole step tells; else it is a lower bound
  bool more_comes = false;  ///< … and modules of the model were not called yet
  int64_t next_bytes =
      0;  ///< … of the next step at the same moment, which holds the optimizer's state as well; 0: no more

  int64_t most() const { return std::max(bytes, next_bytes); }
  bool operator==(const StepNeed&) const = default;
};

/// The primary cause of a refusal, decided from the state it happened in. `growths`: what grew from step to step before it.
Cause find_cause(const OutOfMemory& failure, const Moment& moment, const AllocatorSettings& settings,
                 const Device& card, const std::vector<Growth>& growths = {}, const StepNeed& need = {});

/// How well the bytes in use fill the reserved ones.
Packing measure_packing(const Moment& moment, int64_t total_bytes);

/// The segments whose holes are largest but cannot be given back, and what pins them.
std::vector<PinnedSegment> find_pinned_holes(const Moment& moment, size_t at_most);

}  // namespace oomdiag
