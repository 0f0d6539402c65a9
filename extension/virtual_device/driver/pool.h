#pragma once

#include <cstdint>

#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/heap.h"

namespace oomdiag {

/// A stream-ordered memory pool. It takes pages of the GPU in steps of 32 MiB, as drivers do, and where the GPU has not so
/// much left, those that it needs. What is freed serves the next request, wherever it lies, for pools map pages where they
/// are needed. What it keeps above the release threshold goes back to the GPU when the host next waits for a stream, an
/// event or a context (cuda.h, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD). Under memory_lock(), but for those that say
/// otherwise.
class Pool final : public Pages {
 public:
  static constexpr int64_t kStepBytes = 32 << 20;

  /// Takes the lock. A pool is never destroyed: blocks of it may outlive its handle.
  static Pool& make(Device& device);

  bool charge_pages(int64_t bytes) override;
  void refund_pages(int64_t bytes) override;

  Oom allocate(int64_t bytes, uintptr_t* begin);
  void free(uintptr_t begin, int64_t bytes);

  /// Gives back what no block needs, down to `least` bytes.
  void trim(uint64_t least);

  Device& device() const { return device_; }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t reserved_bytes() const { return reserved_bytes_; }
  int64_t used_high_bytes() const { return used_high_bytes_; }
  int64_t reserved_high_bytes() const { return reserved_high_bytes_; }
  void reset_used_high() { used_high_bytes_ = used_bytes_; }
  void reset_reserved_high() { reserved_high_bytes_ = reserved_bytes_; }
  uint64_t release_threshold() const { return release_threshold_; }
  void set_release_threshold(uint64_t bytes) { release_threshold_ = bytes; }

  /// Gives back what it keeps above the threshold; whether that was anything.
  bool release_surplus();

 private:
  explicit Pool(Device& device) : device_(device) {}
  bool grow(int64_t bytes);

  Device& device_;
  Heap heap_{*this};
  int64_t used_bytes_ = 0;   ///< by blocks
  int64_t paged_bytes_ = 0;  ///< pages that have blocks
  int64_t reserved_bytes_ = 0;
  int64_t used_high_bytes_ = 0;
  int64_t reserved_high_bytes_ = 0;
  uint64_t release_threshold_ = 0;
};

/// The device's pools keep nothing but what their blocks need. Takes the lock.
void trim_pools_of(const Device& device);

/// The host has waited: every pool gives back what it keeps above its threshold. Whether any did. Takes the lock.
bool trim_pools();

}  // namespace oomdiag
