#pragma once

#include <cstdint>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// Where in a trace the state to describe lies.
struct StatePoint {
  uint64_t event = 0;            ///< the failing request, or the allocation that made the peak
  uint64_t state_end = 0;        ///< events before this one made the state
  uint64_t description_end = 0;  ///< one past the last event that describes an OOM; = state_end at a peak
  bool failed = false;           ///< `event` is an OOM
  Phase phase = Phase::setup;
};

/// The events of a tensor and of what refers to it in the end.
struct ReferrerEvents {
  Event maker{};
  uint64_t variable = 0;  ///< index of its name
  uint32_t nodes = 0;
  int64_t bytes = 0;  ///< of the tensor
  bool wants_gradient = false;
  bool of_newest_steps = false;
  bool on_host = false;  ///< no block of the GPU is its storage
  uint64_t born = 0;     ///< of the block
};

/// Likewise of data that are mostly padding.
struct PaddingEvent {
  uint64_t variable = 0, shape = 0;  ///< indices of their names
  int64_t longest = 0, per_mille = 0;
};

/// How much of a GPU others than PyTorch's allocator used, whenever the trace tells.
struct NonPytorchReading {
  uint64_t event = 0;
  int64_t non_pytorch_bytes = 0;
};

/// What the allocation pass finds out about one device. Its allocations are those of the pass's table.
struct FollowedDevice {
  DeviceHistory history{};  ///< all but what is read from the other members
  bool used = false;
  std::vector<NonPytorchReading> non_pytorch{};
  std::vector<uint64_t> non_pytorch_events{};  ///< indices of those that non_pytorch.h reads
  StatePoint point{};
  LiveSet live_set{};        ///< there
  StepCollector step{};      ///< DeviceHistory::step_allocations
  StepCollector complete{};  ///< likewise
  std::vector<ReferrerEvents> referrers{};
  std::vector<PaddingEvent> padded{};
  uint64_t searched_at = kNoEvent;  ///< index of the first of these
  bool search_was_cut = false;      ///< some tensors of variables are not among them
};

}  // namespace oomdiag
