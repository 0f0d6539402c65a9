#include "extension/virtual_device/driver/mapping.h"

#include <map>
#include <unordered_map>

#include "extension/virtual_device/driver/address_space.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {
namespace {

struct Mapping {
  int64_t bytes = 0;
  PhysicalHandle handle = 0;
};

// All under memory_lock(), never destroyed.
auto& reservations = *new std::map<CUdeviceptr, int64_t>;
auto& mappings = *new std::map<CUdeviceptr, Mapping>;
auto& handles = *new std::unordered_map<PhysicalHandle, PhysicalPages>;
PhysicalHandle next_handle = 1;

auto find_entry(CUdeviceptr address) {
  auto entry = mappings.upper_bound(address);
  if (entry == mappings.begin()) return mappings.end();
  --entry;
  return address - entry->first < static_cast<CUdeviceptr>(entry->second.bytes) ? entry : mappings.end();
}

bool is_whole_pages(CUdeviceptr begin, int64_t bytes) {
  return bytes > 0 && bytes % kPageBytes == 0 && begin % static_cast<CUdeviceptr>(kPageBytes) == 0;
}

bool is_reserved(CUdeviceptr begin, int64_t bytes) {
  auto entry = reservations.upper_bound(begin);
  if (entry == reservations.begin()) return false;
  --entry;
  return begin + static_cast<CUdeviceptr>(bytes) <= entry->first + static_cast<CUdeviceptr>(entry->second);
}

/// Whether any of the range is.
bool is_mapped(CUdeviceptr begin, int64_t bytes) {
  const auto next = mappings.lower_bound(begin);
  const bool begins_within = next != mappings.end() && next->first < begin + static_cast<CUdeviceptr>(bytes);
  return begins_within || find_entry(begin) != mappings.end();
}

bool are_whole_mappings(CUdeviceptr begin, int64_t bytes) {
  const CUdeviceptr end = begin + static_cast<CUdeviceptr>(bytes);
  while (begin < end) {
    const auto entry = mappings.find(begin);
    if (entry == mappings.end()) return false;
    begin += static_cast<CUdeviceptr>(entry->second.bytes);
  }
  return begin == end;
}

void drop_reference(PhysicalHandle handle) {
  const auto entry = handles.find(handle);
  if (entry == handles.end() || --entry->second.references > 0) return;
  if (Device* device = find_device(entry->second.device)) refund(*device, entry->second.bytes);
  handles.erase(entry);
}

}  // namespace

CUresult reserve_addresses(int64_t bytes, CUdeviceptr* begin) {
  if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  {
    std::lock_guard guard(memory_lock());
    *begin = take_addresses(round_to_pages(bytes));
    if (*begin) reservations[*begin] = round_to_pages(bytes);
  }
  if (!*begin) note_no_addresses();
  return *begin ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult free_addresses(CUdeviceptr begin, int64_t bytes) {
  std::lock_guard guard(memory_lock());
  const auto entry = reservations.find(begin);
  if (entry == reservations.end() || entry->second != round_to_pages(bytes)) return CUDA_ERROR_INVALID_VALUE;
  give_addresses(begin, entry->second);
  reservations.erase(entry);
  return CUDA_SUCCESS;
}

CUresult create_pages(Device* device, int64_t bytes, PhysicalHandle* handle) {
  if (bytes <= 0 || bytes % kPageBytes) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = device ? make_context(context_on(*device)) : CUDA_SUCCESS) return error;
  std::lock_guard guard(memory_lock());
  if (device && !charge(*device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next_handle++;
  handles[*handle] = {.bytes = bytes, .device = device ? device->ordinal : -1};
  return CUDA_SUCCESS;
}

CUresult release_pages(PhysicalHandle handle) {
  std::lock_guard guard(memory_lock());
  if (!handles.contains(handle)) return CUDA_ERROR_INVALID_VALUE;
  drop_reference(handle);
  return CUDA_SUCCESS;
}

CUresult map_pages(CUdeviceptr begin, int64_t bytes, PhysicalHandle handle) {
  std::lock_guard guard(memory_lock());
  const auto entry = handles.find(handle);
  const bool is_known = entry != handles.end() && bytes <= entry->second.bytes;
  if (!is_known || !is_whole_pages(begin, bytes) || !is_reserved(begin, bytes) || is_mapped(begin, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ++entry->second.references;
  mappings[begin] = {.bytes = bytes, .handle = handle};
  return CUDA_SUCCESS;
}

CUresult unmap_pages(CUdeviceptr begin, int64_t bytes) {
  {
    std::lock_guard guard(memory_lock());
    if (bytes <= 0 || !are_whole_mappings(begin, bytes)) return CUDA_ERROR_INVALID_VALUE;
  }
  oomdiag_device_forget(reinterpret_cast<void*>(begin), static_cast<size_t>(bytes));
  std::lock_guard guard(memory_lock());
  auto entry = mappings.lower_bound(begin);
  while (entry != mappings.end() && entry->first - begin < static_cast<CUdeviceptr>(bytes)) {
    drop_reference(entry->second.handle);
    entry = mappings.erase(entry);
  }
  return CUDA_SUCCESS;
}

CUresult retain_pages(uintptr_t address, PhysicalHandle* handle) {
  std::lock_guard guard(memory_lock());
  const auto entry = find_entry(address);
  if (entry == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  *handle = entry->second.handle;
  ++handles[*handle].references;
  return CUDA_SUCCESS;
}

void release_pages_of(Device& device) {
  std::lock_guard guard(memory_lock());
  const auto is_of_device = [&](PhysicalHandle handle) {
    const auto entry = handles.find(handle);
    return entry != handles.end() && entry->second.device == device.ordinal;
  };
  for (auto entry = mappings.begin(); entry != mappings.end();) {
    if (!is_of_device(entry->second.handle)) {
      ++entry;
      continue;
    }
    oomdiag_device_forget(reinterpret_cast<void*>(entry->first), static_cast<size_t>(entry->second.bytes));
    entry = mappings.erase(entry);
  }
  for (auto entry = handles.begin(); entry != handles.end();) {
    if (entry->second.device != device.ordinal) {
      ++entry;
      continue;
    }
    refund(device, entry->second.bytes);
    entry = handles.erase(entry);
  }
}

std::optional<PhysicalPages> find_pages(PhysicalHandle handle) {
  std::lock_guard guard(memory_lock());
  const auto entry = handles.find(handle);
  return entry == handles.end() ? std::nullopt : std::optional(entry->second);
}

std::optional<MemoryRange> find_mapping(uintptr_t address) {
  const auto entry = find_entry(address);
  if (entry == mappings.end()) return std::nullopt;
  const int device = handles[entry->second.handle].device;
  return MemoryRange{.begin = static_cast<uintptr_t>(entry->first),
                     .bytes = entry->second.bytes,
                     .device = device,
                     .is_mapping = true};
}

}  // namespace oomdiag
