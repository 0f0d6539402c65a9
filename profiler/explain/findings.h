#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/facts.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/owners.h"
#include "profiler/explain/reason.h"
#include "profiler/field.h"
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
  std::string id;
  std::string label;
  std::string formula{};
  std::vector<std::string> modules{};
  std::vector<std::string> ids{};
  std::vector<std::string> how{};
  std::string costs{};
  bool changes_training = false;
  int64_t predicted_peak_bytes = 0;
  bool at_least = false;
  /// What it is known to free of what was allocated then. It may free more, and the step may take more later: no peak, and no bound.
  std::optional<int64_t> frees_bytes{};
  bool saves_little = false;
  std::optional<int64_t> measured_peak_bytes{};
  std::optional<bool> fits{};
  /// None where nothing shows it: a lower bound that is not too much. Of a lower bound only false is ever known.
  std::optional<bool> predicted_fits{};
  /// In a leak, where no fix but the cure is one: about the step that runs out of memory with it.
  std::optional<uint32_t> postpones_to_step{};

  bool operator==(const Fix&) const = default;
};

void visit_fields(auto& visit, Either<Fix> auto& value) {
  visit.object("fix", "A change that would lower the peak.");
  visit({"id", "of a row of fixes, in the tables of profiler/explain/fixes/fixes.h: `autocast_bf16`"}, value.id);
  visit({"label", "its name for people"}, value.label);
  visit.or_null({"formula", "how the peak was computed"}, value.formula);
  visit({"modules", "it is about, as those to checkpoint"}, value.modules);
  visit({"ids", "of a combination: the fixes that it is made of"}, value.ids);
  visit({"how", "lines to paste"}, value.how);
  visit.or_null({"costs", "what it costs"}, value.costs);
  visit({"changes_training", "what is learned is not the same any more"}, value.changes_training);
  visit({"saves_little", "where a lower bound is all that is known: more than three quarters of what the step needs"},
        value.saves_little);
  visit({"predicted_peak_bytes",
         "computed; of a fix with `frees_bytes` what had been allocated at the failure, without these"},
        value.predicted_peak_bytes);
  visit({"frees_bytes", "of a cure whose peak is not known: what it frees of what had been allocated"},
        value.frees_bytes);
  visit({"at_least", "the prediction is only a lower bound, as no complete step was seen"}, value.at_least);
  visit({"measured_peak_bytes", "of a run with it"}, value.measured_peak_bytes);
  visit({"fits", "measured; null where it was not run"}, value.fits);
  visit({"predicted_fits", "computed; null where the lower bound says nothing"}, value.predicted_fits);
  visit({"postpones_to_step", "in a leak, of all fixes but the cure: about the step that runs out of memory with it"},
        value.postpones_to_step);
}

/// Bytes at the described moment as a line over the batch size: fixed + batch × slope.
struct BatchModel {
  int64_t batch = 0;
  int64_t fixed_bytes = 0;
  int64_t scaling_bytes = 0;
  int64_t largest_batch = 0;
  bool inferred = false;

  bool operator==(const BatchModel&) const = default;
};

void visit_fields(auto& visit, Either<BatchModel> auto& value) {
  visit.object("batch", "How the peak follows the batch size.");
  visit({"batch", "examples of a step, as given or inferred from shapes"}, value.batch);
  visit({"fixed_bytes", "of the peak: what stays", {}, kMayBeNegative}, value.fixed_bytes);
  visit({"scaling_bytes", "of the peak: what grows with the batch"}, value.scaling_bytes);
  visit({"largest_batch", "that should still fit"}, value.largest_batch);
  visit({"inferred", "the batch size was not given: it is read from shapes"}, value.inferred);
}

/// Of a run that fits, growth that fills the GPU only after so many steps more is not reported: 16 KiB per step on 16 GiB.
inline constexpr int64_t kDistantSteps = 1'000'000;

/// A reason, and the fixes with its cure.
struct Advice {
  Reason reason{};
  std::vector<Fix> fixes{};

  bool operator==(const Advice&) const = default;
};

void visit_fields(auto& visit, Either<Advice> auto& value) {
  visit.object("advice", "A reason, and the fixes with its cure.");
  visit({"reason", "what of the program is behind it"}, value.reason);
  visit({"fixes", "what would lower the peak"}, value.fixes);
}

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
  /// Of a run that fits and grows: about the step that runs out of memory.
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
