#pragma once

#include <optional>
#include <vector>

#include "profiler/explain/findings.h"

namespace oomdiag {

/// bytes(b) = fixed + scaling ∙ b / batch, with the categories at the described moment. `fixed`: parameters, buffers,
/// gradients, optimizer state, workspaces and what is unknown; `scaling`: the rest, plus the request that was refused. The
/// largest batch is the largest b with bytes(b) ≤ room_bytes. After an OOM it is optimistic: what the step would have
/// wanted later is not in it.
BatchModel model_batch(const Moment& moment, int64_t refused_bytes, int64_t batch, int64_t room_bytes);

/// Remedies with a clear formula, largest saving first; each formula stands above its function in remedies.cpp.
/// `room_bytes`: what PyTorch may take of the card.
std::vector<Remedy> predict_remedies(const Moment& moment, int64_t refused_bytes,
                                     const std::optional<BatchModel>& batch, int64_t room_bytes);

/// Expandable segments, for fragmentation: a segment that grows page by page packs like the perfect packer of `packing`, so
/// the same bytes are allocated and the holes go. It fits where pack_bytes + refused_bytes ≤ room_bytes.
Remedy predict_expandable_segments(const Moment& moment, int64_t refused_bytes, const Packing& packing,
                                   int64_t room_bytes);

}  // namespace oomdiag
