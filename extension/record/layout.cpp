#include "extension/record/layout.h"

#include <ATen/record_function.h>

#include <atomic>

#include "extension/record/allocator_api.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"

// The beginning of a recording that begins in the middle must fit the events that follow it to the byte, while other threads
// allocate. The allocator's snapshot takes a GPU's lock only for itself; but at its end, still under the lock, it
// notifies its trackers that it was taken. So we ask for a snapshot, and when our own tracker hears of it, we ask once
// more inside of it: the lock is recursive, nothing can move on this GPU, and what is written now stands in the trace
// exactly where it belongs.

namespace oomdiag {

namespace {

std::atomic<bool> is_wanted[kMaxDevices] = {};
thread_local bool is_inside = false;

void remember_blocks(const ThreadState& state, const allocator::SegmentInfo& segment, uint8_t device) {
  Event event = state.event(EventKind::alloc);
  event.device = device;
  event.address = segment.address;
  event.detail = reinterpret_cast<uint64_t>(segment.stream);
  event.sequence = session().writer().header().last_sequence.load(std::memory_order_relaxed);
  event.context = event.call_id = 0;  // who allocated it is not known
  event.node_sequence = kNoNode;
  event.flags = pool_flag(number_pool(segment.owner_private_pool_id));
  for (const auto& block : segment.blocks) {
    event.bytes = static_cast<int64_t>(block.requested_size);
    if (block.allocated) {
      session().writer().add_block(event);
      session().add_live_bytes(device, event.bytes);
    }
    event.address += block.size;
  }
}

}  // namespace

uint8_t number_pool(PoolId pool) noexcept {
  static std::atomic<uint64_t> known[kMaxPools - 1] = {};
  const uint64_t key = pool.first != 0 ? pool.first << 1 | 1 : pool.second << 1;  // one of the two is always 0
  if (key == 0) [[likely]]
    return 0;
  for (size_t i = 0; i < std::size(known); ++i) {
    uint64_t is = known[i].load(std::memory_order_relaxed);
    if (is == 0 && known[i].compare_exchange_strong(is, key, std::memory_order_relaxed)) is = key;
    if (is == key) return static_cast<uint8_t>(i + 1);
  }
  return kMaxPools;
}

void write_segment(const ThreadState& state, const allocator::SegmentInfo& segment, uint16_t flags) {
  Event event = state.event(EventKind::segment_state);
  event.device = static_cast<uint8_t>(segment.device);
  event.address = segment.address;
  event.bytes = static_cast<int64_t>(segment.total_size);
  event.detail = reinterpret_cast<uint64_t>(segment.stream);
  const uint16_t pool = pool_flag(number_pool(segment.owner_private_pool_id));
  event.flags = static_cast<uint16_t>(flags | pool | (segment.is_large ? kSegmentLarge : 0) |
                                      (segment.is_expandable ? kSegmentExpandable : 0));
  session().writer().write(event);
  for (const auto& block : segment.blocks) {
    Event part = event;
    part.kind = EventKind::block_state;
    part.bytes = static_cast<int64_t>(block.size);
    part.detail = block.requested_size;
    part.flags = static_cast<uint16_t>(flags | (block.allocated ? kBlockAllocated
                                                : block.active  ? kBlockPendingFree
                                                                : 0));
    session().writer().write(part);
    event.address += block.size;
  }
}

void write_beginning() {
  const at::DisableRecordFunctionGuard no_ops;
  const uint32_t devices = session().device_count;
  // PyTorch's own history has an entry for each snapshot. Of GPUs that hold nothing there is nothing to write.
  bool any = false;
  for (uint32_t d = 0; d < devices; ++d) {
    const auto reserved = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(d)).reserved_bytes[0].current;
    is_wanted[d] = reserved > 0;
    any = any || reserved > 0;
  }
  if (!any) return;
  take_snapshot(*allocator::get());
  for (uint32_t d = 0; d < devices; ++d) is_wanted[d] = false;
}

void note_snapshot(uint8_t device) noexcept try {
  if (is_inside || device >= kMaxDevices || !is_wanted[device].exchange(false)) return;
  is_inside = true;
  const ThreadState& state = thread_state();
  session().writer().forget_blocks(device);
  session().live_bytes_of[device] = 0;
  for (const auto& segment : take_snapshot(*allocator::get()).segments) {
    if (static_cast<uint8_t>(segment.device) != device) continue;
    write_segment(state, segment, kBeforeRecording);
    remember_blocks(state, segment, device);
  }
  is_inside = false;
} catch (...) {
  is_inside = false;
}

}  // namespace oomdiag
