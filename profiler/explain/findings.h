#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "profiler/explain/causes.h"
#include "profiler/explain/facts.h"
#include "profiler/explain/growth.h"
#include "profiler/explain/owners.h"
#include "profiler/explain/reasons.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// Named figures in a fixed order.
using Figures = std::vector<std::pair<std::string, int64_t>>;

/// A segment with a hole that its other blocks keep from being used or given back.
struct BlockedSegment {
  int64_t bytes = 0;
  int64_t largest_free_block_bytes = 0;
  int64_t used_bytes = 0;
  std::vector<LiveBlock> blocked_by{};  ///< its largest blocks in use, at most 3

  bool operator==(const BlockedSegment&) const = default;
};

struct Cause {
  CauseKind kind = CauseKind::capacity;
  std::string_view because{};  ///< name of the row of kCauses
  int64_t short_by_bytes = 0;  ///< what is missing even if every cached byte could be used; 0 where nothing is
  FailureFacts facts{};
  std::vector<NonPytorchOwner> holders{};  ///< of non_pytorch: who has more than a process needs, largest first
  std::vector<BlockedSegment>
      blocked_segments{};  ///< where free and cached bytes are enough: largest free blocks first, at most 5

  bool operator==(const Cause&) const = default;
};

/// LOAD ≤ PACK ≤ RESERVED ≤ TOTAL.
struct Packing {
  int64_t load_bytes = 0;  ///< in use
  int64_t pack_bytes = 0;  ///< what a perfect packer would reserve for them: whole 2 MiB pages per stream and pool
  int64_t reserved_bytes = 0;
  int64_t total_bytes = 0;  ///< of the GPU

  bool operator==(const Packing&) const = default;
};

/// A change that would lower the peak: computed, and run where that was asked.
struct Fix {
  std::string id;                      ///< "autocast_bf16", "checkpoint", "batch_6400"
  std::string label;                   ///< "bf16 autocast"
  std::string formula{};               ///< how the peak was computed, in words
  std::vector<std::string> modules{};  ///< that are to be checkpointed
  std::vector<std::string> ids{};      ///< of a combination: the fixes that it is made of
  std::vector<std::string> how{};      ///< lines to paste: "export PYTORCH_CUDA_ALLOC_CONF=…", or code
  std::string costs{};                 ///< "forward of 24 layers runs twice: 1.3 GiB recomputed", or empty: nothing
  bool changes_training = false;       ///< what is learned is another: another optimizer, fewer examples per step
  int64_t predicted_peak_bytes = 0;    ///< of one with frees_bytes: what had been allocated, without these
  bool at_least = false;               ///< no whole step was seen: the peak is a lower bound
  /// What it is known to free of what was allocated then. It may free more, and the step may take more later: no peak, and no bound.
  std::optional<int64_t> frees_bytes{};
  bool saves_little = false;  ///< where that is all that is known: so little that it will hardly be enough
  std::optional<int64_t> measured_peak_bytes{};
  std::optional<bool> fits{};  ///< measured
  /// None where nothing shows it: a lower bound that is not too much. Of a lower bound only false is ever known.
  std::optional<bool> predicted_fits{};
  /// In a leak, where no fix but the cure is one: about the step that runs out of memory with it.
  std::optional<uint32_t> postpones_to_step{};

  bool operator==(const Fix&) const = default;
};

/// Bytes at the described moment as a line over the batch size: fixed + batch × slope.
struct BatchModel {
  int64_t batch = 0;
  int64_t fixed_bytes = 0;  ///< parameters, buffers, gradients, optimizer state, workspace of matrix products, unknown
  int64_t scaling_bytes = 0;  ///< everything else at `batch`, and the failed request
  int64_t largest_batch = 0;  ///< predicted to fit; after an OOM at most that one
  bool inferred = false;      ///< the batch size was not given: it is the size that tensors share

  bool operator==(const BatchModel&) const = default;
};

/// Growth that fills the device only after so many steps more is not worth a word in the headline: 16 KiB per step on 16 GiB.
inline constexpr int64_t kDistantSteps = 1'000'000;

/// A reason, and the fixes with its cure.
struct Advice {
  Reason reason{};
  std::vector<Fix> fixes{};

  bool operator==(const Advice&) const = default;
};

/// What is to be said about one GPU.
struct Findings {
  std::optional<Cause> cause{};  ///< none unless it ran out of memory
  Packing packing{};
  int64_t headroom_bytes = 0;  ///< free on the GPU and cached, not in private pools, at the described moment
  /// The smallest GPU on which the described moment would have passed, predicted: what others hold, the packed bytes in
  /// use, what private pools keep and the segment that failed. After an OOM it is a lower bound: what would have come later is
  /// not in it.
  int64_t required_bytes = 0;
  std::vector<Growth> growths{};
  /// Of a run that fits and grows: about the step that runs out of memory. None if that is more than kDistantSteps away.
  std::optional<uint32_t> out_of_memory_near_step{};
  Owners owners{};
  std::optional<Lifetime> largest{};
  std::optional<BatchModel> batch{};
  std::vector<Fix> fixes{};
  std::optional<Reason> reason{};  ///< what of the program is behind the cause, where that is known
  /// What else is behind it. Of fragmentation it takes the place of both where a complete run shows that the step does not fit even if all
  /// is packed.
  std::optional<Advice> besides{};

  bool operator==(const Findings&) const = default;
};

}  // namespace oomdiag
