#include "extension/virtual_device/driver/pool.h"

#include <algorithm>

namespace oomdiag {
namespace {

constexpr int64_t round_to_steps(int64_t bytes) {
  return (bytes + Pool::kStepBytes - 1) / Pool::kStepBytes * Pool::kStepBytes;
}

}  // namespace

bool Pool::take_pages(int64_t bytes) {
  const int64_t missing = paged_bytes_ + bytes - reserved_bytes_;
  if (missing > 0 && !grow(missing)) return false;
  paged_bytes_ += bytes;
  return true;
}

bool Pool::grow(int64_t bytes) {
  for (const int64_t step : {round_to_steps(bytes), bytes}) {
    if (!take(device_, Holder::pools, step)) continue;
    reserved_bytes_ += step;
    reserved_high_bytes_ = std::max(reserved_high_bytes_, reserved_bytes_);
    return true;
  }
  return false;
}

void Pool::give_pages(int64_t bytes) {
  paged_bytes_ -= bytes;
  trim(release_threshold_);
}

Refusal Pool::allocate(int64_t bytes, uintptr_t* begin) {
  const Refusal refusal = heap_.allocate(bytes, begin);
  if (refusal != Refusal::none) return refusal;
  used_bytes_ += SmallHeap::align(bytes);  // what was asked for, also where a block has pages of its own
  used_high_bytes_ = std::max(used_high_bytes_, used_bytes_);
  return Refusal::none;
}

void Pool::free(uintptr_t begin, int64_t bytes) {
  used_bytes_ -= SmallHeap::align(bytes);
  heap_.free(begin, bytes);
}

void Pool::trim(uint64_t least) {
  const auto asked = static_cast<int64_t>(std::min<uint64_t>(least, INT64_MAX));
  const int64_t kept = std::max(asked, round_to_steps(paged_bytes_));
  if (kept >= reserved_bytes_) return;
  give_back(device_, Holder::pools, reserved_bytes_ - kept);
  reserved_bytes_ = kept;
}

}  // namespace oomdiag
