#include "extension/cupti/driver_books.h"

#include "profiler/trace/card_pages.h"

namespace oomdiag {

using Change = BookEntry::Change;

BookEntry DriverBooks::book(const DriverCall& call, const DriverCaller& caller) noexcept {
  switch (call.action) {
    case DriverAction::allocate:
      return call.refused ? BookEntry{} : allocate(call, caller);
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

BookEntry DriverBooks::allocate(const DriverCall& call, const DriverCaller& caller) noexcept {
  const bool is_handle = call.memory == DriverMemory::handle;
  const DriverEntry entry{.address = call.address,
                          .bytes = call.bytes,
                          .context = is_handle ? 0 : caller.context,
                          .owner = caller.owner,
                          .device = call.device < 0 ? caller.device : static_cast<uint8_t>(call.device),
                          .memory = call.memory};
  if (!(is_handle ? handles_ : blocks_).insert(call.address, entry)) ++lost_;
  count(entry, 1);
  return {.change = Change::allocated, .entry = entry};
}

BookEntry DriverBooks::release(const DriverCall& call) noexcept {
  if (call.memory == DriverMemory::handle) return drop_reference(call.address);
  const DriverEntry* entry = blocks_.find(call.address);
  if (entry == nullptr) return {};
  const BookEntry booked{.change = Change::freed, .entry = *entry};
  blocks_.erase(call.address);
  count(booked.entry, -1);
  return booked;
}

BookEntry DriverBooks::map(const DriverCall& call) noexcept {
  DriverEntry* entry = handles_.find(call.address);
  if (entry == nullptr) return {};  // imported from another process, which pays for it
  if (!mappings_.insert(call.mapped, {call.address, call.bytes})) {
    ++lost_;
    return {};
  }
  ++entry->references;
  return {.change = Change::mapped, .entry = *entry, .mapped = call.mapped};
}

// A range may hold several mappings, one behind the other: the caller goes on behind the one that was booked.
BookEntry DriverBooks::unmap(const DriverCall& call) noexcept {
  const Mapping* mapping = mappings_.find(call.mapped);
  if (mapping == nullptr || mapping->bytes > call.bytes) return {};
  const Mapping found = *mapping;
  mappings_.erase(call.mapped);
  BookEntry booked = drop_reference(found.handle);
  booked.unmapped = found.bytes;
  return booked;
}

BookEntry DriverBooks::drop_reference(uint64_t handle) noexcept {
  DriverEntry* entry = handles_.find(handle);
  if (entry == nullptr || --entry->references > 0) return {};
  const BookEntry booked{.change = Change::freed, .entry = *entry};
  handles_.erase(handle);
  count(booked.entry, -1);
  return booked;
}

BookEntry DriverBooks::drop_one_of(uint64_t context) noexcept {
  BookEntry booked;
  blocks_.for_each([&](uint64_t, const DriverEntry& entry) {
    if (entry.context == context) booked = {.change = Change::freed, .entry = entry};
  });
  if (booked.change == Change::none) return {};
  blocks_.erase(booked.entry.address);
  count(booked.entry, -1);
  return booked;
}

void DriverBooks::count(const DriverEntry& entry, int sign) noexcept {
  if (!is_card_memory(entry.memory)) return;
  card_bytes_[entry.device % kMaxDevices] += sign * charged_bytes(entry.bytes, page_bytes_);
}

}  // namespace oomdiag
