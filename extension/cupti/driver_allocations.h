#pragma once

#include <cstdint>
#include <unordered_map>

#include "extension/cupti/driver_call.h"
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
/// the program is wrong. Calls must not overlap.
class DriverAllocations {
 public:
  /// The GPU charges each allocation by whole units of `page_bytes`; those of at most half a unit share units.
  explicit DriverAllocations(int64_t page_bytes) : page_bytes_(page_bytes) {}

  /// Records one call; `caller` is only looked at for allocations.
  AllocationChange record(const DriverCall& call, const DriverCaller& caller);

  /// Takes out what goes with this context and calls `visit(entry)` for each: a context that is destroyed takes its memory
  /// with it.
  template <typename Visit>
  void drop_all_of(uint64_t context, Visit visit) {
    std::erase_if(blocks_, [&](const auto& block) {
      const DriverEntry& entry = block.second;
      if (entry.context != context) return false;
      count(entry, -1);
      visit(entry);
      return true;
    });
  }

  /// Bytes of the GPU's own memory that are out on this device.
  int64_t gpu_bytes(uint8_t device) const { return gpu_bytes_[device % kMaxDevices]; }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const auto& [address, entry] : blocks_) visit(entry);
    for (const auto& [handle, entry] : handles_) visit(entry);
  }

 private:
  struct Mapping {
    uint64_t handle = 0;
    int64_t bytes = 0;
  };

  using Entries = std::unordered_map<uint64_t, DriverEntry>;

  AllocationChange allocate(const DriverCall& call, const DriverCaller& caller);
  AllocationChange release(const DriverCall& call);
  AllocationChange map(const DriverCall& call);
  AllocationChange unmap(const DriverCall& call);
  AllocationChange drop_reference(uint64_t handle);
  AllocationChange free(Entries& from, Entries::iterator entry);
  void count(const DriverEntry& entry, int sign);

  Entries blocks_;   ///< by address
  Entries handles_;  ///< by handle
  std::unordered_map<uint64_t, Mapping> mappings_;
  int64_t page_bytes_;
  int64_t gpu_bytes_[kMaxDevices] = {};
};

/// Whether memory of this kind is the GPU's own.
constexpr bool is_gpu_memory(DriverMemory memory) {
  return memory != DriverMemory::managed && memory != DriverMemory::pinned;
}

}  // namespace oomdiag
