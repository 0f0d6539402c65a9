#include "profiler/replay/non_pytorch/non_pytorch.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <set>

#include "profiler/event.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"
#include "profiler/trace/gpu_pages.h"
#include "profiler/trace/trace.h"

// The tracking table of what PyTorch does not count. PyTorch's own segments come by here too, because its allocator
// asks the same driver: they are recognised by the library that asks, libc10_cuda, and where a program gave a memory
// pool an allocator of its own (ncclMemAlloc, say) by the segment that PyTorch makes of it right afterwards.

namespace oomdiag {
namespace {

constexpr std::string_view kPyTorchAllocator = "libc10_cuda.so";
constexpr int64_t kPageBytes = int64_t{2} << 20;  // of a virtual GPU

bool is_on_gpu(DriverMemory memory) {
  switch (memory) {
    case DriverMemory::device:
    case DriverMemory::handle:
    case DriverMemory::pool:
    case DriverMemory::array:
      return true;
    case DriverMemory::managed:
    case DriverMemory::pinned:
      return false;
  }
  return false;
}

DriverMemory memory_of(const Event& event) {
  const auto number = static_cast<uint16_t>(event.flags & kDriverMemoryMask);
  return number <= static_cast<uint16_t>(kLastDriverMemory) ? static_cast<DriverMemory>(number) : DriverMemory::device;
}

std::string_view or_unknown(std::string_view owner) { return owner.empty() ? "an unknown library" : owner; }

DriverAllocation read_allocation(const Trace& trace, const Event& event) {
  DriverAllocation allocation{.bytes = sane_bytes(event.bytes),
                              .memory = memory_of(event),
                              .owner = trace.name(event.detail),
                              .context = event.context,
                              .announced = (event.flags & kDriverAnnounced) != 0};
  if (trace.process.virtual_device && is_on_gpu(allocation.memory)) {
    allocation.bytes = charged_bytes(allocation.bytes, kPageBytes);
  }
  return allocation;
}

bool holds(uint64_t begin, const DriverAllocation& allocation, uint64_t address) {
  return address - begin < static_cast<uint64_t>(allocation.bytes);
}

void note_mapping(const Event& event, NonPytorchState& state) {
  const auto found = state.live.find(event.detail);
  if (found == state.live.end() || found->second.mapped != 0) return;
  found->second.mapped = event.address;
  state.handle_at[event.address] = event.detail;
}

// The greatest key at or below `address`, or the end.
template <class Map>
auto last_at_or_below(Map& map, uint64_t address) {
  const auto after = map.upper_bound(address);
  return after == map.begin() ? map.end() : std::prev(after);
}

void note_segment(const Event& event, NonPytorchState& state) {
  const auto block = last_at_or_below(state.live, event.address);
  if (block != state.live.end() && holds(block->first, block->second, event.address)) block->second.pytorchs = true;
  const auto mapping = last_at_or_below(state.handle_at, event.address);
  if (mapping == state.handle_at.end()) return;
  const auto pages = state.live.find(mapping->second);
  if (pages != state.live.end() && holds(mapping->first, pages->second, event.address)) pages->second.pytorchs = true;
}

void forget(const Event& event, NonPytorchState& state) {
  const auto found = state.live.find(event.address);
  if (found == state.live.end()) return;
  state.handle_at.erase(found->second.mapped);
  state.live.erase(found);
}

void note_process(const Trace& trace, const Event& event, NonPytorchState& state) {
  if ((event.flags & kFirstProcess) != 0) state.processes.clear();
  if (event.address != 0) state.processes.push_back({event.address, sane_bytes(event.bytes), trace.name(event.detail)});
}

// PyTorch's own failed requests are out_of_memory events.
void note_failed_request(const Trace& trace, const Event& event, NonPytorchState& state) {
  const std::string_view owner = or_unknown(trace.name(event.detail));
  if (owner == kPyTorchAllocator) return;
  const auto found = std::find_if(state.failed_requests.begin(), state.failed_requests.end(),
                                  [&](const NonPytorchOwner& one) { return one.owner == owner; });
  if (found == state.failed_requests.end()) {
    state.failed_requests.push_back(
        {std::string(owner), std::string(name_of(memory_of(event))), sane_bytes(event.bytes)});
  } else {
    found->bytes = std::max(found->bytes, sane_bytes(event.bytes));
  }
}

void note_allocation(const Trace& trace, const Event& event, NonPytorchState& state) {
  if ((event.flags & kDriverOutOfMemory) != 0) return note_failed_request(trace, event, state);
  if ((event.flags & kDriverAnnounced) != 0 && state.live.contains(event.address)) return;
  state.live[event.address] = read_allocation(trace, event);
}

void apply(const Trace& trace, const Event& event, NonPytorchState& state) {
  if (event.kind == EventKind::driver_alloc) note_allocation(trace, event, state);
  if (event.kind == EventKind::driver_map) note_mapping(event, state);
  if (event.kind == EventKind::driver_free) forget(event, state);
  if (event.kind == EventKind::segment_alloc || event.kind == EventKind::segment_map) note_segment(event, state);
  if (event.kind == EventKind::gpu_step)
    state.steps.push_back({std::string(trace.name(event.detail)), sane_bytes(event.bytes)});
  if (event.kind == EventKind::gpu_process) note_process(trace, event, state);
}

// Allocations that are older than the trace. Those whose own event is in it begin there.
void apply_announced(const Trace& trace, std::span<const uint64_t> events, NonPytorchState& state) {
  std::set<uint64_t> seen;
  for (const uint64_t index : events) {
    const Event event = trace.events[index];
    if (event.kind != EventKind::driver_alloc) continue;
    const bool announced = (event.flags & kDriverAnnounced) != 0;
    if (announced && !seen.contains(event.address)) apply(trace, event, state);
    seen.insert(event.address);
  }
}

bool has_segment(uint64_t begin, const DriverAllocation& allocation, std::span<const SegmentLayout> segments) {
  return std::any_of(segments.begin(), segments.end(),
                     [&](const SegmentLayout& segment) { return holds(begin, allocation, segment.address); });
}

bool is_pytorchs(uint64_t address, const DriverAllocation& allocation, std::span<const SegmentLayout> segments) {
  return allocation.owner == kPyTorchAllocator || allocation.pytorchs ||
         (allocation.announced && has_segment(address, allocation, segments));
}

/// Adds `bytes` to the line of this owner and kind.
void add_owner(std::vector<NonPytorchOwner>& owners, std::string_view owner, std::string_view kind, int64_t bytes) {
  const auto found = std::find_if(owners.begin(), owners.end(),
                                  [&](const NonPytorchOwner& one) { return one.owner == owner && one.kind == kind; });
  if (found == owners.end()) {
    owners.push_back({std::string(owner), std::string(kind), bytes});
  } else {
    found->bytes = std::min(found->bytes + bytes, kMaxSaneBytes);
  }
}

void sort_by_size(std::vector<NonPytorchOwner>& owners) {
  std::stable_sort(owners.begin(), owners.end(), [](const NonPytorchOwner& a, const NonPytorchOwner& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.owner < b.owner;
  });
}

// "process 4711 python". Windows is no process of this machine: a virtual GPU lists it with an id that Linux gives to none.
NonPytorchOwner owner_of(const GpuProcess& process) {
  constexpr uint64_t kLeastForeignPid = 1 << 22;
  const std::string name(process.name);
  if (process.pid >= kLeastForeignPid && name == "Windows") return {name, "system", process.bytes};
  return {"process " + std::to_string(process.pid) + (name.empty() ? "" : " " + name), "process", process.bytes};
}

}  // namespace

std::string_view name_of(DriverMemory memory) {
  constexpr std::array<std::string_view, 6> kNames = {"device", "handle", "pool", "array", "managed", "pinned"};
  return kNames[static_cast<size_t>(memory)];
}

NonPytorchState read_non_pytorch(const Trace& trace, std::span<const uint64_t> events, uint64_t end) {
  NonPytorchState state;
  if (trace.overwritten_events > 0) apply_announced(trace, events, state);
  for (const uint64_t index : events) {
    if (index >= end) break;
    apply(trace, trace.events[index], state);
  }
  return state;
}

std::vector<NonPytorchOwner> list_owners(const NonPytorchState& state, std::span<const SegmentLayout> segments) {
  std::vector<NonPytorchOwner> owners;
  for (const InitializationStep& step : state.steps) {
    const bool modules = step.name.starts_with("modules");
    if (modules || step.name == "context") add_owner(owners, modules ? "modules" : "context", "device", step.bytes);
  }
  std::vector<NonPytorchOwner> libraries;
  for (const auto& [address, allocation] : state.live) {
    if (!is_on_gpu(allocation.memory) || is_pytorchs(address, allocation, segments)) continue;
    add_owner(libraries, or_unknown(allocation.owner), name_of(allocation.memory), allocation.bytes);
  }
  sort_by_size(libraries);
  owners.insert(owners.end(), libraries.begin(), libraries.end());
  for (const GpuProcess& process : state.processes) {
    owners.push_back(owner_of(process));
  }
  std::erase_if(owners, [](const NonPytorchOwner& owner) { return owner.bytes == 0; });
  return owners;
}

std::vector<NonPytorchOwner> list_host_owners(const NonPytorchState& state) {
  std::vector<NonPytorchOwner> owners;
  for (const auto& [address, allocation] : state.live) {
    if (is_on_gpu(allocation.memory)) continue;
    add_owner(owners, or_unknown(allocation.owner), name_of(allocation.memory), allocation.bytes);
  }
  sort_by_size(owners);
  return owners;
}

std::vector<PinnedHostMemory> list_pinned_host_memory(const Trace& trace, const NonPytorchState& state) {
  std::vector<PinnedHostMemory> places;
  std::map<std::pair<std::string_view, uint32_t>, size_t> place_of;  // by library and context
  for (const auto& [address, allocation] : state.live) {
    if (allocation.memory != DriverMemory::pinned) continue;
    const auto [found, is_new] = place_of.try_emplace({allocation.owner, allocation.context}, places.size());
    if (is_new) {
      const Context& context = trace.context(allocation.context);
      places.push_back({.owner = std::string(or_unknown(allocation.owner)),
                        .op = std::string(trace.name(context.op)),
                        .module = std::string(trace.name(context.module)),
                        .source = std::string(trace.name(context.source)),
                        .inner_source = std::string(trace.name(context.inner_source))});
    }
    PinnedHostMemory& place = places[found->second];
    place.bytes = std::min(place.bytes + allocation.bytes, kMaxSaneBytes);
    ++place.blocks;
  }
  std::ranges::stable_sort(places, std::ranges::greater{}, &PinnedHostMemory::bytes);
  return places;
}

int64_t sum_of(std::span<const NonPytorchOwner> owners) {
  int64_t sum = 0;
  for (const NonPytorchOwner& owner : owners) sum = std::min(sum + owner.bytes, kMaxSaneBytes);
  return sum;
}

}  // namespace oomdiag
