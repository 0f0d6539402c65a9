#include "profiler/replay/allocator/layout.h"

#include <algorithm>
#include <vector>

#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/history.h"

namespace oomdiag {

SegmentLayout lay_out(std::span<const Block> segment) {
  SegmentLayout layout{.address = segment.front().address,
                       .stream = segment.front().stream,
                       .pool = segment.front().pool,
                       .small = segment.front().small,
                       .expandable = segment.front().expandable};
  std::vector<const Block*> used;
  for (const Block& block : segment) {
    layout.bytes += block.bytes;
    if (block.state == Block::State::free) {
      ++layout.holes;
      layout.largest_free_block_bytes = std::max(layout.largest_free_block_bytes, block.bytes);
    } else {
      layout.used_bytes += block.bytes;
      used.push_back(&block);
    }
  }
  std::sort(used.begin(), used.end(), [](const Block* a, const Block* b) { return a->bytes > b->bytes; });
  for (size_t i = 0; i < used.size() && i < 3; ++i) layout.blocked_by.push_back(used[i]->address);
  return layout;
}

}  // namespace oomdiag
