#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>

#include "profiler/replay/history.h"

namespace oomdiag {

using BlocksByAddress = std::map<uint64_t, const LiveBlock*>;

inline BlocksByAddress by_address(std::span<const LiveBlock> live) {
  BlocksByAddress blocks;
  for (const LiveBlock& block : live) blocks[block.address] = &block;
  return blocks;
}

/// A segment from its beginning to its end: calls use(offset, bytes, block), null for a free block. Together they fill
/// it.
template <class Use>
void for_each_piece(const SegmentLayout& segment, const BlocksByAddress& blocks, Use use) {
  const uint64_t end = segment.address + static_cast<uint64_t>(segment.bytes);
  int64_t at = 0;
  for (auto block = blocks.lower_bound(segment.address); block != blocks.end() && block->first < end; ++block) {
    const auto offset = static_cast<int64_t>(block->first - segment.address);
    if (offset < at) continue;
    if (offset > at) use(at, offset - at, nullptr);
    const int64_t bytes = std::min(block->second->bytes, segment.bytes - offset);
    use(offset, bytes, block->second);
    at = offset + bytes;
  }
  if (at < segment.bytes) use(at, segment.bytes - at, nullptr);
}

}  // namespace oomdiag
