#pragma once

#include <cstdint>
#include <optional>

#include "profiler/explain/findings.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// bytes(b) = fixed + scaling ∙ b / batch, with the categories at the described moment. `fixed`: parameters, buffers,
/// gradients, optimizer state, workspaces of matrix products and what is unknown; `scaling`: the rest, plus the request that
/// failed. The largest batch is the largest b with bytes(b) ≤ available_bytes. After an OOM it is below `batch`, and
/// optimistic: what the step would have requested later is not in it, and fragmentation is not counted.
BatchModel model_batch(const MemoryState& state, int64_t requested_bytes, int64_t batch, int64_t available_bytes);

/// The largest b with bytes(b) ≤ available_bytes; 0 where none is known.
int64_t largest_batch_by_bytes(const BatchModel& model, int64_t available_bytes);

/// The batch size that the shapes of a moment show: the largest first size that an input has, else the smallest that some saved
/// tensor has; it must divide the first sizes of those that hold four fifths of the bytes ([8, 1024, 768] and
/// [8192, 3072]: 8). None where there is no such.
std::optional<int64_t> find_batch(const MemoryState& state);

}  // namespace oomdiag
