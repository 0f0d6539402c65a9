#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/imbalance.h"
#include "profiler/field.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What the step that failed needs from its beginning to its end.
struct StepNeed {
  int64_t bytes = 0;
  bool whole = false;
  bool more_comes = false;
  int64_t next_bytes = 0;

  int64_t most() const { return std::max(bytes, next_bytes); }
  bool operator==(const StepNeed&) const = default;
};

void visit_fields(auto& visit, Either<StepNeed> auto& value) {
  visit.object("step_need", "What the step needs.");
  visit({"bytes", "the most that the step allocates at once; 0: not known"}, value.bytes);
  visit({"complete", "false: `bytes` is a lower bound"}, value.whole);
  visit({"modules_to_come", "modules with parameters had not been called yet"}, value.more_comes);
  visit({"next_bytes", "of the next step at the same point, which holds the optimizer's state as well; 0: no more"},
        value.next_bytes);
}

/// As many results alike and a loop keeps them.
inline constexpr int64_t kFewestAlike = 4;

/// All that the choice of a cause looks at, and its evidence in the report. It is collected before the first row of kCauses is
/// asked; what becomes known later (other ranks, a complete run) is added here, and the rows are asked again.
struct FailureFacts {
  int64_t requested_bytes = 0;
  int64_t segment_bytes = 0;
  bool is_workspace = false;
  bool forward_continues = false;
  int64_t kept_alike = 0;
  int64_t kept_results_bytes = 0;
  std::string library{};
  int64_t releasable_bytes = 0;

  int64_t total_bytes = 0;
  bool total_is_known = true;  ///< a snapshot does not record it
  int64_t free_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t cached_bytes = 0;
  int64_t usable_cached_bytes = 0;
  int64_t other_pools_cached_bytes = 0;
  int64_t largest_free_block_bytes = 0;
  int64_t pending_free_bytes = 0;
  int64_t non_pytorch_bytes = 0;
  int64_t usual_non_pytorch_bytes = 0;

  int64_t allowed_bytes = 0;
  bool limit_is_inferred = false;

  int64_t grown_bytes = 0, bytes_per_step = 0;
  uint32_t grown_until_step = 0;

  StepNeed step{};
  std::optional<Imbalance> imbalance{};
  std::optional<int64_t> complete_run_allocated_bytes{}, complete_run_reserved_bytes{};

  /// What PyTorch may take of the device.
  int64_t available_bytes() const {
    const bool is_limited = allowed_bytes > 0 && !limit_is_inferred;
    return std::min(total_bytes - non_pytorch_bytes, is_limited ? allowed_bytes : total_bytes);
  }
  /// Free and cached bytes together are enough: what is missing is a free block of that size.
  bool is_enough_if_packed() const { return free_bytes + usable_cached_bytes >= segment_bytes; }
  int64_t left_if_packed_bytes() const {
    return std::max<int64_t>(0, free_bytes + usable_cached_bytes - segment_bytes);
  }
  /// What the rest of the step, or the next one, lacks even if all is packed.
  int64_t lacking_later_bytes() const { return std::max<int64_t>(0, step.most() - available_bytes()); }

  bool operator==(const FailureFacts&) const = default;
};

void visit_fields(auto& visit, Either<FailureFacts> auto& value) {
  visit.object("evidence", "The facts that the choice of a cause rests on.");
  visit({"requested_bytes", "of the block that was requested"}, value.requested_bytes);
  visit({"segment_bytes", "that the allocator asks the driver for: 20 MiB for anything from 1 to 10 MiB"},
        value.segment_bytes);
  visit({"is_workspace", "it was scratch space of cuBLAS or cuDNN, not a tensor"}, value.is_workspace);
  visit({"forward_continues", "it failed in forward, which goes on"}, value.forward_continues);
  visit({"kept_alike", "blocks in use of its size that the same op at the same line made: a loop keeps each"},
        value.kept_alike);
  visit({"kept_results_bytes",
         "of the most results alike, at least four, that are in use and no graph needs: a loop keeps each"},
        value.kept_results_bytes);
  visit.or_null({"library", "that asked the driver itself"}, value.library);
  visit({"releasable_bytes", "what `empty_cache()` would free for it"}, value.releasable_bytes);
  visit({"total_bytes", "of the device"}, value.total_bytes);
  visit({"total_is_known", "false where a snapshot does not record it"}, value.total_is_known);
  visit({"free_bytes", "of the device", {}, kMayBeNegative}, value.free_bytes);
  visit({"reserved_bytes", "by PyTorch"}, value.reserved_bytes);
  visit({"cached_bytes", "reserved, not allocated"}, value.cached_bytes);
  visit({"usable_cached_bytes", "of those, what this request may use: in segments with blocks in use, of its own pool"},
        value.usable_cached_bytes);
  visit({"other_pools_cached_bytes", "cached in pools that do not serve this request"}, value.other_pools_cached_bytes);
  visit({"largest_free_block_bytes", "in the pool of the request"}, value.largest_free_block_bytes);
  visit({"pending_free_bytes", "freed, in use on another stream"}, value.pending_free_bytes);
  visit({"non_pytorch_bytes", "in use by others than PyTorch's allocator", {}, kMayBeNegative},
        value.non_pytorch_bytes);
  visit({"usual_non_pytorch_bytes", "what any process takes of it"}, value.usual_non_pytorch_bytes);
  visit({"allowed_bytes", "the limit that the program set, or all of the device"}, value.allowed_bytes);
  visit({"limit_is_inferred", "at most that much, as the limit is not recorded"}, value.limit_is_inferred);
  visit({"grown_bytes", "from step to step, in all", {}, kMayBeNegative}, value.grown_bytes);
  visit({"bytes_per_step", "by which it grows", {}, kMayBeNegative}, value.bytes_per_step);
  visit({"grown_until_step", "the last step of the growth"}, value.grown_until_step);
  visit({"step", "what the step needs"}, value.step);
  visit({"imbalance", "between the devices or ranks of the program"}, value.imbalance);
  visit({"complete_run_allocated_bytes", "peak of a complete run on a larger device, where one was made"},
        value.complete_run_allocated_bytes);
  visit({"complete_run_reserved_bytes", "likewise"}, value.complete_run_reserved_bytes);
}

/// The facts about `device.failure`. `limitations`: the device that it is judged by. Imbalance is not among them yet.
FailureFacts collect_facts(const DeviceHistory& device, const AllocatorSettings& settings, const Device& limits,
                           const std::vector<Growth>& growths, const StepNeed& need);

/// Who holds non-PyTorch memory beyond context and modules, largest first.
std::vector<NonPytorchOwner> list_foreign_owners(const MemoryState& state);

}  // namespace oomdiag
