#include "extension/cupti/driver_allocations.h"

#include "extension/cupti/driver_call.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/gpu_pages.h"

namespace oomdiag {

using Kind = AllocationChange::Kind;

AllocationChange DriverAllocations::record(const DriverCall& call, const DriverCaller& caller) noexcept {
  switch (call.action) {
    case DriverAction::allocate:
      return call.out_of_memory ? AllocationChange{} : allocate(call, caller);
    case DriverAction::release:
      return release(call);
    case DriverAction::map:
      return map(call);
    case DriverAction::unmap:
      return unmap(call);
    case DriverAction::retain:
      if (DriverEntry* entry = handles_.find(call.address)) ++entry->references;
      return {};
    case DriverAction::none:
      return {};
  }
  return {};
}

AllocationChange DriverAllocations::allocate(const DriverCall& call, const DriverCaller& caller) noexcept {
  const bool is_handle = call.memory == DriverMemory::handle;
  const DriverEntry entry{.address = call.address,
                          .bytes = call.bytes,
                          .context = is_handle ? 0 : caller.context,
                          .owner = caller.owner,
                          .device = call.device < 0 ? caller.device : static_cast<uint8_t>(call.device),
                          .memory = call.memory};
  if (!(is_handle ? handles_ : blocks_).insert(call.address, entry)) {  // its release would not be known
    ++lost_;
    return {};
  }
  count(entry, 1);
  return {.kind = Kind::allocated, .entry = entry};
}

AllocationChange DriverAllocations::release(const DriverCall& call) noexcept {
  if (call.memory == DriverMemory::handle) return drop_reference(call.address);
  const DriverEntry* entry = blocks_.find(call.address);
  if (entry == nullptr) return {};
  const AllocationChange change{.kind = Kind::freed, .entry = *entry};
  blocks_.erase(call.address);
  count(change.entry, -1);
  return change;
}

AllocationChange DriverAllocations::map(const DriverCall& call) noexcept {
  DriverEntry* entry = handles_.find(call.address);
  if (entry == nullptr) return {};  // imported from another process, which pays for it
  if (!mappings_.insert(call.mapped, {call.address, call.bytes})) {
    ++lost_;
    return {};
  }
  ++entry->references;
  return {.kind = Kind::mapped, .entry = *entry, .mapped = call.mapped};
}

// A range may hold several mappings, one behind the other: the caller continues behind the one that was recorded.
AllocationChange DriverAllocations::unmap(const DriverCall& call) noexcept {
  const Mapping* mapping = mappings_.find(call.mapped);
  if (mapping == nullptr || mapping->bytes > call.bytes) return {};
  const Mapping found = *mapping;
  mappings_.erase(call.mapped);
  AllocationChange change = drop_reference(found.handle);
  change.unmapped = found.bytes;
  return change;
}

AllocationChange DriverAllocations::drop_reference(uint64_t handle) noexcept {
  DriverEntry* entry = handles_.find(handle);
  if (entry == nullptr || --entry->references > 0) return {};
  const AllocationChange change{.kind = Kind::freed, .entry = *entry};
  handles_.erase(handle);
  count(change.entry, -1);
  return change;
}

void DriverAllocations::count(const DriverEntry& entry, int sign) noexcept {
  if (!is_gpu_memory(entry.memory)) return;
  gpu_bytes_[entry.device % kMaxDevices] += sign * charged_bytes(entry.bytes, page_bytes_);
}

}  // namespace oomdiag
