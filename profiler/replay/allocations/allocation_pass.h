#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"

namespace oomdiag {

/// Where in a trace the state to describe lies.
struct Instant {
  uint8_t device = 0;
  uint64_t event = 0;            ///< the failing request, or the allocation that made the peak
  uint64_t state_end = 0;        ///< events before this one made the state
  uint64_t description_end = 0;  ///< one past the last event that describes an OOM; = state_end at a peak
  bool failed = false;           ///< `event` is an OOM
  Phase phase = Phase::setup;
};

/// What is to be looked at of one card.
struct Wanted {
  Instant instant{};
  std::vector<uint32_t> steps{};  ///< that are to be told block by block; 0 is none
};

/// What one card's blocks tell.
struct CardViews {
  Cut cut{};
  std::vector<StepSlice> steps{};  ///< as they were wanted
  StepCurves curves{};
};

/// All of them, and the table that they are views of.
struct Views {
  BlockTable table{};
  std::vector<CardViews> cards{};  ///< as they were wanted
};

/// The second pass over `trace`: follows every block from its allocation to its free.
Views follow_lives(const Trace& trace, const Outline& outline, const NodeTable& nodes,
                   const AllocatorSettings& settings, std::span<const Wanted> wanted);

}  // namespace oomdiag
