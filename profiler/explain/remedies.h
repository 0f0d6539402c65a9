#pragma once

#include <optional>
#include <vector>

#include "profiler/explain/findings.h"

namespace oomdiag {

/// bytes(b) = fixed + scaling ∙ b / batch, with the categories at the described moment. `fixed`: parameters, buffers,
/// gradients, optimizer state, workspaces of matrix products and what is unknown; `scaling`: the rest, plus the request that
/// was refused. The largest batch is the largest b with bytes(b) ≤ room_bytes. After an OOM it is below `batch`, and
/// optimistic: what the step would have wanted later is not in it, and the holes of fragmentation count as room.
BatchModel model_batch(const Moment& moment, int64_t refused_bytes, int64_t batch, int64_t room_bytes);

/// What predictions start from.
struct Situation {
  const StepLives& lives;
  int64_t peak_bytes = 0;          ///< of the run; after an OOM what was in use and the refused request
  int64_t room_bytes = 0;          ///< what PyTorch may take of the card
  std::optional<int64_t> batch{};  ///< where it is known
  int64_t grown_bytes = 0;         ///< from step to step
  bool has_backward = true;        ///< the program ran backward, or died before it could
};

/// Remedies that lower the peak, largest saving first; each formula stands above its rule in remedy_rules.cpp, and in
/// words in the remedy.
std::vector<Remedy> predict_remedies(const Situation& situation);

/// Expandable segments, for fragmentation: a segment that grows page by page packs like the perfect packer of `packing`, so
/// the same bytes are allocated and the holes go. It fits where pack_bytes + refused_bytes ≤ room_bytes.
Remedy predict_expandable_segments(const Moment& moment, int64_t refused_bytes, const Packing& packing,
                                   int64_t room_bytes);

}  // namespace oomdiag
