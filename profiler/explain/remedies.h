#pragma once

#include <optional>
#include <vector>

#include "profiler/explain/findings.h"

namespace oomdiag {

/// What predictions start from.
struct Situation {
  const StepLives& lives;
  int64_t peak_bytes = 0;  ///< of the run; after an OOM that of the step, had it gone on
  int64_t room_bytes = 0;  ///< what PyTorch may take of the card
  int64_t private_pool_cached_bytes =
      0;                           ///< of it: cached in private pools; the step may or may not be able to reuse it
  std::optional<int64_t> batch{};  ///< where it is known
  int64_t grown_bytes = 0;         ///< from step to step
  bool has_backward = true;        ///< the program ran backward, as far as was seen
  bool whole = true;               ///< `lives` is a whole step; else what is known of one, and peaks are lower bounds
  uint32_t forward_end = 0;        ///< where forward ends in a step that is not whole
  AllocatorSettings settings{};
  int compute_major = 0;         ///< of the card, 0 = not known
  std::string_view optimizer{};  ///< class of the one that has most parameters, "AdamW", or empty
  bool sharded = false;          ///< parameters are shared with other ranks already

  /// The same with another step.
  Situation with(const StepLives& other) const {
    return {other,       peak_bytes,  room_bytes,    private_pool_cached_bytes,
            batch,       grown_bytes, has_backward,  whole,
            forward_end, settings,    compute_major, optimizer,
            sharded};
  }
};

/// Whether GPUs of this compute capability have bfloat16: from Ampere, 8.0, on. 0 = not known, taken to have it.
bool has_bfloat16(int compute_major);

/// Remedies that lower the peak, largest saving first; each formula stands above its rule in remedy_rules.cpp, and in
/// words in the remedy. What is said to fit gets through the allocator as well (arena.h).
std::vector<Remedy> predict_remedies(const Situation& situation);

/// Expandable segments, for fragmentation: the same bytes are allocated, and hardly any holes are between them.
Remedy predict_expandable_segments(const Situation& situation);

}  // namespace oomdiag
