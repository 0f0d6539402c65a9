#include "extension/record/allocator_hooks.h"

#include <ATen/record_function.h>

#include "extension/cupti/collector.h"
#include "extension/environment.h"
#include "extension/record/allocator_api.h"
#include "extension/record/graph_walk.h"
#include "extension/record/layout.h"
#include "extension/record/native_stack.h"
#include "extension/record/op_callbacks.h"
#include "extension/record/python.h"
#include "extension/record/session.h"
#include "extension/record/steady.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"

namespace oomdiag {

namespace {

using Action = allocator::TraceEntry::Action;

constexpr int kMaxDescribedOoms = 64;  // in full; a program that lives on OOMs would fill the trace with them
constexpr size_t kMaxDescribedBlocks = 1 << 16;

EventKind kind_of(Action action) noexcept {
  switch (action) {
    case Action::ALLOC:
      return EventKind::alloc;
    case Action::FREE_REQUESTED:
      return EventKind::free_requested;
    case Action::FREE_COMPLETED:
      return EventKind::free_completed;
    case Action::SEGMENT_ALLOC:
      return EventKind::segment_alloc;
    case Action::SEGMENT_FREE:
      return EventKind::segment_free;
    case Action::SEGMENT_MAP:
      return EventKind::segment_map;
    case Action::SEGMENT_UNMAP:
      return EventKind::segment_unmap;
    case Action::OOM:
      return EventKind::out_of_memory;
    default:
      return EventKind::none;  // SNAPSHOT (our own), ANNOTATE
  }
}

// Runs inside the allocator, under its lock: no lock, no allocation, no Python, no throw. Between two requests the program takes
// the caches, and each line and page of what runs here is fetched anew: what is [[gnu::hot]] lies together, and what is rare
// ([[gnu::cold]]) elsewhere.
[[gnu::hot]] void on_trace(const allocator::TraceEntry& entry) noexcept {
  if (!recording()) return;
  const EventKind kind = kind_of(entry.action_);
  if (kind == EventKind::none) {
    if (entry.action_ == Action::SNAPSHOT) note_snapshot(static_cast<uint8_t>(entry.device_));
    return;
  }
  Session& now = session();
  const auto device = static_cast<uint8_t>(entry.device_);
  if (kind == EventKind::free_completed && now.writer().complete_last_free(device, entry.addr_)) return;
  now.writer().expect_block(device, entry.addr_, kind == EventKind::alloc);
  const auto time = static_cast<uint64_t>(entry.time_.approx_t_);
  ThreadState* state = existing_thread_state();
  Event event = state != nullptr ? state->event(kind, time) : Event{.time = time, .kind = kind};
  event.address = entry.addr_;
  event.bytes = static_cast<int64_t>(entry.size_);
  event.detail = reinterpret_cast<uint64_t>(entry.stream_);
  event.device = device;
  const bool is_free = kind == EventKind::free_requested || kind == EventKind::free_completed;
  if (!is_free) event.flags = pool_flag(number_pool(pool_of(entry)));
  if (kind == EventKind::free_requested) event.context = 0;  // the table of live blocks knows it
  const bool is_request = kind == EventKind::alloc || kind == EventKind::out_of_memory;
  if (is_request) {
    write_in_step(state, event);
  } else {
    now.writer().write(event);
  }
  if (kind == EventKind::out_of_memory && state != nullptr) state->oom.note_request(event);
  if (kind == EventKind::alloc) {
    now.add_live_bytes(device, event.bytes);
    if (event.sequence != 0) now.writer().add_block(event);
  } else if (kind == EventKind::free_requested) {
    now.add_live_bytes(device, -event.bytes);
    now.writer().remove_block(event.device, event.address, event.sequence);
  }
}

void write_stats(const ThreadState& state, uint8_t device) {
  const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
  Event event = state.event(EventKind::memory_stats);
  event.device = device;
  event.address = static_cast<uint64_t>(stats.reserved_bytes[0].current);
  event.bytes = stats.allocated_bytes[0].current;
  event.detail = static_cast<uint64_t>(stats.reserved_bytes[0].peak);
  event.node_sequence = static_cast<uint64_t>(stats.allocated_bytes[0].peak);
  session().writer().write(event);
}

void write_device_memory(const ThreadState& state, uint8_t device) {
  const auto [free, total] = read_gpu_memory(*allocator::get(), static_cast<c10::DeviceIndex>(device));
  Event event = state.event(EventKind::device_memory);
  event.device = device;
  event.address = free;
  event.bytes = static_cast<int64_t>(total);
  session().writer().write(event);
}

// The replay has a layout of its own: without the allocator's it is as good as the events that the trace still has.
void write_layout(const ThreadState& state, uint8_t device) {
  if (keeps_history(*allocator::get())) return;
  const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
  if (stats.active[0].current > static_cast<int64_t>(kMaxDescribedBlocks)) return;  // 0.2 µs for each
  const auto snapshot = take_snapshot(*allocator::get());                           // without traces
  size_t blocks = 0;
  for (const auto& segment : snapshot.segments) blocks += segment.blocks.size();
  if (blocks > kMaxDescribedBlocks) return;
  for (const auto& segment : snapshot.segments) {
    if (static_cast<uint8_t>(segment.device) == device) write_segment(state, segment, 0);
  }
}

void write_native_stack(ThreadState& state) {
  NativeStack stack;
  stack.capture();
  Event event = state.event(EventKind::stack);
  event.flags = kNativeStack;
  event.detail = session().writer().intern(std::string_view(describe_calls(stack)));
  session().writer().write(event);
}

// Runs when all retries failed, before the exception, on the requesting thread, with the allocator unlocked. What
// it throws would replace the program's OutOfMemoryError.
void on_oom(int64_t device, size_t, size_t, size_t) noexcept try {
  if (!recording()) return;
  ThreadState& state = thread_state();
  const auto index = static_cast<uint8_t>(device);
  state.oom.open(state.event(EventKind::op_failed), index);
  state.divergence.resolve(state);
  const RunningNode node(state);
  write_stats(state, index);
  write_device_memory(state, index);
  // A convolution may fail to get dozens of workspaces: what it found at the first one still holds.
  if (state.oom.is_described(state.place.now().call_id) || session().described_ooms.fetch_add(1) >= kMaxDescribedOoms)
    return;
  const at::DisableRecordFunctionGuard no_ops;
  write_python_stack();
  if (variables::is_on(variables::kNativeStacks)) write_native_stack(state);
  write_parameter_groups(true);
  describe_gpu(index);
  write_layout(state, index);
  describe_graph_at_oom(state);
} catch (...) {
}

}  // namespace

// Steps that make a new peak are few: the first ones, and those of a leak, of which not all need be recorded.
bool note_peak() noexcept try {
  int64_t peak = 0;
  for (uint32_t d = 0; d < session().device_count; ++d) {
    peak += allocator::getDeviceStats(static_cast<c10::DeviceIndex>(d)).allocated_bytes[0].peak;
  }
  std::atomic<int64_t>& highest = session().highest_grouped;
  const int64_t before = highest.load(std::memory_order_relaxed);
  if (peak - before <= before / 50) return false;
  highest.store(peak, std::memory_order_relaxed);
  return true;
} catch (...) {
  return false;
}

bool uses_several_devices() noexcept try {
  const uint32_t devices = session().device_count;
  uint32_t used = 0;
  for (uint32_t d = 0; devices > 1 && d < devices; ++d) {
    if (allocator::getDeviceStats(static_cast<c10::DeviceIndex>(d)).reserved_bytes[0].peak > 0) ++used;
  }
  return used > 1;
} catch (...) {
  return true;
}

void attach_allocator_hooks() {
  allocator::attachOutOfMemoryObserver(on_oom);  // does not lock: first, before other threads allocate
  allocator::attachAllocatorTraceTracker(on_trace);
}

void note_library_oom(int device, int64_t bytes) noexcept try {
  if (!recording()) return;
  ThreadState& state = thread_state();
  Event event = state.event(EventKind::out_of_memory);
  event.address = read_gpu_memory(*allocator::get(), static_cast<c10::DeviceIndex>(device)).first;
  event.bytes = bytes;
  event.device = static_cast<uint8_t>(device);
  event.flags = kAskedByLibrary;
  session().writer().write(event);
  state.oom.note_request(event);
  on_oom(device, 0, 0, 0);
} catch (...) {
}

void write_memory_stats() noexcept try {
  if (!recording()) return;
  const ThreadState& state = thread_state();
  for (uint32_t d = 0; d < session().writer().header().device_count; ++d) {
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(d));
    if (stats.reserved_bytes[0].peak == 0) continue;
    write_stats(state, static_cast<uint8_t>(d));
    describe_gpu(static_cast<uint8_t>(d));
    write_device_memory(state, static_cast<uint8_t>(d));
  }
} catch (...) {
}

}  // namespace oomdiag
