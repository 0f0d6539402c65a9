#include "extension/cupti/driver_allocations.h"

#include "extension/cupti/driver_call.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/gpu_pages.h"

namespace oomdiag {

using Kind = AllocationChange::Kind;

AllocationChange DriverAllocations::record(const DriverCall& call, const DriverCaller& caller) {
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
      if (const auto entry = handles_.find(call.address); entry != handles_.end()) ++entry->second.references;
      return {};
    case DriverAction::none:
      return {};
  }
  return {};
}

AllocationChange DriverAllocations::allocate(const DriverCall& call, const DriverCaller& caller) {
  const bool is_handle = call.memory == DriverMemory::handle;
  const DriverEntry entry{.address = call.address,
                          .bytes = call.bytes,
                          .context = is_handle ? 0 : caller.context,
                          .owner = caller.owner,
                          .device = call.device < 0 ? caller.device : static_cast<uint8_t>(call.device),
                          .memory = call.memory};
  (is_handle ? handles_ : blocks_)[call.address] = entry;
  count(entry, 1);
  return {.kind = Kind::allocated, .entry = entry};
}

AllocationChange DriverAllocations::release(const DriverCall& call) {
  if (call.memory == DriverMemory::handle) return drop_reference(call.address);
  return free(blocks_, blocks_.find(call.address));
}

AllocationChange DriverAllocations::map(const DriverCall& call) {
  const auto entry = handles_.find(call.address);
  if (entry == handles_.end()) return {};  // imported from another process, which pays for it
  mappings_[call.mapped] = {call.address, call.bytes};
  ++entry->second.references;
  return {.kind = Kind::mapped, .entry = entry->second, .mapped = call.mapped};
}

// A range may hold several mappings, one behind the other: the caller continues behind the one that was recorded.
AllocationChange DriverAllocations::unmap(const DriverCall& call) {
  const auto mapping = mappings_.find(call.mapped);
  if (mapping == mappings_.end() || mapping->second.bytes > call.bytes) return {};
  const Mapping found = mapping->second;
  mappings_.erase(mapping);
  AllocationChange change = drop_reference(found.handle);
  change.unmapped = found.bytes;
  return change;
}

AllocationChange DriverAllocations::drop_reference(uint64_t handle) {
  const auto entry = handles_.find(handle);
  if (entry != handles_.end() && --entry->second.references > 0) return {};
  return free(handles_, entry);
}

AllocationChange DriverAllocations::free(Entries& from, Entries::iterator entry) {
  if (entry == from.end()) return {};
  const AllocationChange change{.kind = Kind::freed, .entry = entry->second};
  from.erase(entry);
  count(change.entry, -1);
  return change;
}

void DriverAllocations::count(const DriverEntry& entry, int sign) {
  if (!is_gpu_memory(entry.memory)) return;
  gpu_bytes_[entry.device % kMaxDevices] += sign * charged_bytes(entry.bytes, page_bytes_);
}

}  // namespace oomdiag
