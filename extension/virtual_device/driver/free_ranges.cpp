#include "extension/virtual_device/driver/free_ranges.h"

#include <iterator>

namespace oomdiag {

std::optional<uintptr_t> FreeRanges::take_highest(uintptr_t bytes) {
  for (auto piece = free_.rbegin(); piece != free_.rend(); ++piece) {
    if (piece->second < bytes) continue;
    piece->second -= bytes;
    const uintptr_t begin = piece->first + piece->second;
    if (piece->second == 0) free_.erase(piece->first);
    return begin;
  }
  return std::nullopt;
}

std::optional<uintptr_t> FreeRanges::take_lowest(uintptr_t bytes) {
  for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
    if (piece->second < bytes) continue;
    const auto [begin, size] = *piece;
    const auto after = free_.erase(piece);
    if (size > bytes) free_.emplace_hint(after, begin + bytes, size - bytes);
    return begin;
  }
  return std::nullopt;
}

FreeRanges::Range FreeRanges::give(uintptr_t begin, uintptr_t bytes) {
  auto next = free_.lower_bound(begin);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin && may_join(begin)) {
      begin = before->first;
      bytes += before->second;
      next = free_.erase(before);
    }
  }
  if (next != free_.end() && begin + bytes == next->first && may_join(next->first)) {
    bytes += next->second;
    free_.erase(next);
  }
  free_[begin] = bytes;
  return {begin, bytes};
}

}  // namespace oomdiag
