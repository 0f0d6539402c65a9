#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {

std::optional<uintptr_t> SmallHeap::take(int64_t bytes) {
  const int64_t whole = align(bytes);
  const auto block = free_.take_lowest(static_cast<uintptr_t>(whole));
  if (block) blocks_[*block] = whole;
  return block;
}

int64_t SmallHeap::bytes_of(uintptr_t block) const {
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? 0 : found->second;
}

std::optional<uintptr_t> SmallHeap::give(uintptr_t block) {
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) return std::nullopt;
  const FreeRanges::Range now_free = free_.give(block, static_cast<uintptr_t>(found->second));
  blocks_.erase(found);
  if (now_free.bytes < static_cast<uintptr_t>(kPageBytes)) return std::nullopt;
  free_.remove(now_free);
  return now_free.begin;
}

}  // namespace oomdiag
