#pragma once

#include <cstdint>

#include "extension/record/allocator_api.h"

namespace oomdiag {

struct ThreadState;

/// The number of a pool in events: 0 for the one that everything shares. Neither locks nor allocates.
uint8_t number_pool(PoolId pool) noexcept;

/// Writes a segment of the allocator's own snapshot and its blocks: a segment_state, then a block_state for each. `flags`
/// (EventFlag) are added to theirs.
void write_segment(const ThreadState& state, const allocator::SegmentInfo& segment, uint16_t flags);

/// For recordings that begin in the middle of a program: writes what every GPU holds at this moment, from the allocator's
/// snapshot, and puts its blocks into the tables of live blocks. Writes nothing where nothing is reserved.
void write_beginning();
/// The allocator's hook calls this, under the GPU's lock, when a snapshot of the GPU was taken.
void note_snapshot(uint8_t device) noexcept;

}  // namespace oomdiag
