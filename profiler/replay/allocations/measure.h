#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"

namespace oomdiag {

/// How much of a card others than PyTorch's allocator used, whenever the trace tells.
struct OutsideReading {
  uint64_t event = 0;
  int64_t outside_bytes = 0;
};

/// What the first pass over a trace finds out about one device.
struct Measured {
  DeviceHistory history;  ///< all but `moment`, `failure`, `curves` and `lives`
  std::vector<OutsideReading> outside;
  std::vector<uint64_t> outside_events;  ///< indices of those that outside.h reads
  bool used = false;
};

/// The first pass over a trace.
struct Measurements {
  std::vector<Measured> devices;  ///< by device index
  NodeTable nodes;
  uint32_t steps = 0;
};

/// Replays all of `trace`: peaks, phases, timeline, joins, and the state at each OOM of `outline`.
Measurements measure(const Trace& trace, const Outline& outline, const AllocatorSettings& settings);

}  // namespace oomdiag
