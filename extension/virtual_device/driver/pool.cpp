#include "extension/virtual_device/driver/pool.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/heap.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {
namespace {

constexpr int64_t round_to_steps(int64_t bytes) {
  return (bytes + Pool::kStepBytes - 1) / Pool::kStepBytes * Pool::kStepBytes;
}

auto& pools = *new std::vector<Pool*>;  // all of the process, under memory_lock(), never destroyed
std::atomic<bool> may_have_surplus = false;

}  // namespace

Pool& Pool::make(Device& device) {
  std::lock_guard guard(memory_lock());
  pools.push_back(new Pool(device));
  return *pools.back();
}

bool Pool::charge_pages(int64_t bytes) {
  const int64_t missing = paged_bytes_ + bytes - reserved_bytes_;
  if (missing > 0 && !grow(missing)) return false;
  paged_bytes_ += bytes;
  return true;
}

bool Pool::grow(int64_t bytes) {
  for (const int64_t step : {round_to_steps(bytes), bytes}) {
    if (!charge(device_, step)) continue;
    reserved_bytes_ += step;
    reserved_high_bytes_ = std::max(reserved_high_bytes_, reserved_bytes_);
    return true;
  }
  return false;
}

void Pool::refund_pages(int64_t bytes) {
  paged_bytes_ -= bytes;
  may_have_surplus = true;
}

Oom Pool::allocate(int64_t bytes, uintptr_t* begin) {
  const Oom oom = heap_.allocate(bytes, begin);
  if (oom != Oom::none) return oom;
  used_bytes_ += SmallHeap::align(bytes);  // what was asked for, also where a block has pages of its own
  used_high_bytes_ = std::max(used_high_bytes_, used_bytes_);
  return Oom::none;
}

void Pool::free(uintptr_t begin, int64_t bytes) {
  used_bytes_ -= SmallHeap::align(bytes);
  heap_.free(begin, bytes);
}

bool Pool::release_surplus() {
  const int64_t before = reserved_bytes_;
  trim(release_threshold_);
  return reserved_bytes_ < before;
}

void trim_pools_of(const Device& device) {
  std::lock_guard guard(memory_lock());
  for (Pool* pool : pools) {
    if (&pool->device() == &device) pool->trim(0);
  }
}

bool trim_pools() {
  if (!may_have_surplus.load(std::memory_order_relaxed) || is_forked_child()) return false;
  std::lock_guard guard(memory_lock());
  may_have_surplus = false;
  bool has_released = false;
  for (Pool* pool : pools) has_released |= pool->release_surplus();
  return has_released;
}

void Pool::trim(uint64_t least) {
  const auto asked = static_cast<int64_t>(std::min<uint64_t>(least, INT64_MAX));
  const int64_t kept = std::max(asked, round_to_steps(paged_bytes_));
  if (kept >= reserved_bytes_) return;
  refund(device_, reserved_bytes_ - kept);
  reserved_bytes_ = kept;
}

}  // namespace oomdiag
