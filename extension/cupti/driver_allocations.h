#pragma once

#include <cstdint>

#include "extension/cupti/driver_call.h"
#include "extension/cupti/fixed_map.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"

namespace oomdiag {

/// Something that the driver gave and has not got back.
struct DriverEntry {
  uint64_t address = 0;  ///< pointer or handle
  int64_t bytes = 0;
  uint64_t context = 0;  ///< CUcontext that it goes with; 0 for pages of a handle, which belong to the device
  uint16_t owner = 0;    ///< whatever the caller numbers owners by
  uint8_t device = 0;
  DriverMemory memory = DriverMemory::device;
  int32_t references = 1;  ///< of a handle: its creator's and one per mapping
};

/// Who allocates: the parts of an entry that are not parameters of the call.
struct DriverCaller {
  uint64_t context = 0;
  uint16_t owner = 0;
  uint8_t device = 0;
};

/// What a call changed.
struct AllocationChange {
  enum class Kind : uint8_t { none, allocated, mapped, freed } kind = Kind::none;
  DriverEntry entry{};
  uint64_t mapped = 0;   ///< of `mapped`: where
  int64_t unmapped = 0;  ///< of an unmap call: bytes of the first mapping in the range, the one that was recorded
};

/// What the driver has given in this process. Releases of what it never gave are ignored: it was given before we listened, or
/// the program is wrong. Neither allocates nor throws; calls must not overlap.
class DriverAllocations {
 public:
  /// The GPU charges each allocation by whole units of `page_bytes`; those of at most half a unit share units.
  explicit DriverAllocations(int64_t page_bytes) : page_bytes_(page_bytes) {}

  /// Records one call; `caller` is only looked at for allocations.
  AllocationChange record(const DriverCall& call, const DriverCaller& caller) noexcept;

  /// Takes out what goes with this context and calls `visit(entry)` for each: a context that is destroyed takes its memory
  /// with it.
  template <typename Visit>
  void drop_all_of(uint64_t context, Visit visit) {
    blocks_.erase_if([&](const DriverEntry& entry) {
      if (entry.context != context) return false;
      count(entry, -1);
      visit(entry);
      return true;
    });
  }

  /// Bytes of the GPU's own memory that are out on this device.
  int64_t gpu_bytes(uint8_t device) const { return gpu_bytes_[device % kMaxDevices]; }

  /// Allocations that did not fit.
  uint64_t lost() const { return lost_; }

  template <typename Visit>
  void for_each(Visit visit) {
    blocks_.for_each([&](uint64_t, const DriverEntry& entry) { visit(entry); });
    handles_.for_each([&](uint64_t, const DriverEntry& entry) { visit(entry); });
  }

 private:
  struct Mapping {
    uint64_t handle = 0;
    int64_t bytes = 0;
  };

  AllocationChange allocate(const DriverCall& call, const DriverCaller& caller) noexcept;
  AllocationChange release(const DriverCall& call) noexcept;
  AllocationChange map(const DriverCall& call) noexcept;
  AllocationChange unmap(const DriverCall& call) noexcept;
  AllocationChange drop_reference(uint64_t handle) noexcept;
  void count(const DriverEntry& entry, int sign) noexcept;

  FixedMap<DriverEntry> blocks_;
  FixedMap<DriverEntry> handles_;
  FixedMap<Mapping> mappings_;
  int64_t page_bytes_;
  int64_t gpu_bytes_[kMaxDevices] = {};
  uint64_t lost_ = 0;
};

/// Whether memory of this kind is the GPU's own.
constexpr bool is_gpu_memory(DriverMemory memory) {
  return memory != DriverMemory::managed && memory != DriverMemory::pinned;
}

}  // namespace oomdiag
