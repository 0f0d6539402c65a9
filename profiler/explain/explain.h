#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "profiler/explain/findings.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Bytes of each category in `moment`, indexed by Category.
std::array<int64_t, kCategoryCount> sum_categories(const Moment& moment);

/// Explains one card of a replayed run. `batch` is the batch size of the run, where the caller knows it.
Findings explain(const DeviceHistory& device, const AllocatorSettings& settings, const Device& card,
                 std::optional<int64_t> batch);

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
