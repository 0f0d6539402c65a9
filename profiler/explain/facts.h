#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/growth.h"
#include "profiler/explain/imbalance.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What the step that failed needs from its beginning to its end.
struct StepNeed {
  int64_t bytes = 0;        ///< allocated at once; 0: not known
  bool whole = false;       ///< of a complete step; else a lower bound
  bool more_comes = false;  ///< modules with parameters had not been called yet
  int64_t next_bytes =
      0;  ///< of the next step at the same point, which holds the optimizer's state as well; 0: no more

  int64_t most() const { return std::max(bytes, next_bytes); }
  bool operator==(const StepNeed&) const = default;
};

/// All that the choice of a cause looks at, and its evidence in the report. It is collected before the first row of kCauses is
/// asked; what becomes known later (other ranks, a complete run) is added here, and the rows are asked again.
struct FailureFacts {
  int64_t requested_bytes = 0;     ///< as the allocator rounds it to a block
  int64_t segment_bytes = 0;       ///< that the allocator asks the driver for: 20 MiB for anything from 1 to 10 MiB
  bool is_workspace = false;       ///< scratch space of cuBLAS or cuDNN, not a tensor
  bool forward_continues = false;  ///< it failed in forward, where what is saved stays and more of it comes
  int64_t kept_alike = 0;  ///< blocks in use of its size that the same op at the same line made: a loop keeps each
  std::string library{};   ///< that asked the driver itself, or empty
  int64_t releasable_bytes = 0;  ///< of segments without a block in use, which empty_cache() frees

  int64_t total_bytes = 0;          ///< of the device
  bool total_is_known = true;       ///< a snapshot does not record it
  int64_t free_bytes = 0;           ///< of the device
  int64_t reserved_bytes = 0;       ///< by PyTorch
  int64_t cached_bytes = 0;         ///< reserved, not allocated
  int64_t usable_cached_bytes = 0;  ///< of those, in segments that have blocks in use and serve the pool of the request
  int64_t other_pools_cached_bytes = 0;  ///< cached in pools that do not serve it
  int64_t largest_free_block_bytes = 0;  ///< in the pool of the request
  int64_t pending_free_bytes = 0;        ///< freed, in use on another stream
  int64_t non_pytorch_bytes = 0;
  int64_t usual_non_pytorch_bytes = 0;  ///< what any process takes before PyTorch does

  int64_t allowed_bytes = 0;       ///< the limit that the program set, or total_bytes
  bool limit_is_inferred = false;  ///< it is not recorded, and not above allowed_bytes

  int64_t grown_bytes = 0, bytes_per_step = 0;  ///< from step to step
  uint32_t grown_until_step = 0;

  StepNeed step{};
  std::optional<Imbalance> imbalance{};  ///< between the devices or ranks of one program
  std::optional<int64_t> complete_run_allocated_bytes{},
      complete_run_reserved_bytes{};  ///< measured, on a larger device

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

/// The facts about `device.failure`. `limitations`: the device that it is judged by. Imbalance is not among them yet.
FailureFacts collect_facts(const DeviceHistory& device, const AllocatorSettings& settings, const Device& limits,
                           const std::vector<Growth>& growths, const StepNeed& need);

/// Who holds non-PyTorch memory beyond context and modules, largest first.
std::vector<NonPytorchOwner> list_foreign_owners(const MemoryState& state);

}  // namespace oomdiag
