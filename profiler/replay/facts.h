#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "profiler/replay/blocks.h"
#include "profiler/replay/outline.h"

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

/// What the events say about one block that is in use at the instant.
struct Facts {
  Phase phase = Phase::setup;  ///< in which it was allocated
  uint32_t step = 0;           ///< likewise
  bool parameter = false, buffer = false, gradient = false, ever_saved = false;
  bool dies_in_op = false;
  bool op_made_nodes = false;
  bool first_in_op = true;
  uint64_t name = 0, shape = 0, group = 0;  ///< indices of names
  std::vector<uint64_t> saved_by{};         ///< saved_tensor events of the graph that lives at the instant
};

/// What the events say about an instant.
struct FactSheet {
  std::vector<Facts> blocks;  ///< one for each block given
  bool saved_by_likeness =
      false;  ///< the graph was not walked: what it keeps is taken from an earlier step, see walks.h
  uint64_t optimizer_open_since = Outline::kNever;  ///< scope_begin of an optimizer step that had not ended
};

/// Collects the facts about `blocks`, which are in use at `instant`. Events after the instant count where they still speak
/// of the same block: a module may name its parameters later, and the graph is walked when backward begins.
FactSheet collect_facts(const Trace& trace, const Outline& outline, const Instant& instant,
                        std::span<const Block> blocks);

/// The alloc event that made `block`.
Event maker_of(const Trace& trace, const Block& block);

}  // namespace oomdiag
