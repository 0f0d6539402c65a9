#include "profiler/trace/initial_blocks.h"

#include <algorithm>
#include <unordered_set>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/format.h"
#include "profiler/trace/order.h"

namespace oomdiag {

namespace {

class InitialBlocks {
 public:
  InitialBlocks(const TraceHeader& header, uint64_t first_sequence, uint64_t last_sequence)
      : header_(header), first_(first_sequence), last_(last_sequence) {}

  std::vector<Event> find(const std::shared_ptr<const InputFile>& file, const EventLog& events) {
    for (uint32_t d = 0; d < header_.device_count; ++d) read_table(file, d);
    std::sort(freed_.begin(), freed_.end(), by_free);
    for (const Event& event : events) note(event);
    std::sort(found_.begin(), found_.end(), [](const Event& a, const Event& b) { return a.sequence < b.sequence; });
    return std::move(found_);
  }

 private:
  void read_table(const std::shared_ptr<const InputFile>& file, uint32_t device) {
    const uint64_t offset = header_.tables_offset + device * header_.slots_per_device * sizeof(Event);
    if (offset >= file->bytes()) return;
    EventFile slots(file, offset);
    const uint64_t count = std::min(header_.slots_per_device, (file->bytes() - offset) / sizeof(Event));
    for (uint64_t slot = 0; slot < count; ++slot) {
      Event block = slots.event(slot);
      if (block.kind != EventKind::alloc || block.device != device || block.sequence >= first_) continue;
      if (!is_sound(block, header_.device_count)) continue;
      const bool is_freed = (block.flags & kSlotFreed) != 0;
      if (is_freed && block.detail <= last_) {
        freed_.push_back(block);
        continue;
      }
      if (is_freed) block.detail = block.flags = 0;  // after the last event that counts: its stream and pool are gone
      found_.push_back(block);
    }
  }

  void note(const Event& event) {
    if (event.kind != EventKind::alloc && event.kind != EventKind::free_requested) return;
    const bool seen_before = !seen_.insert(event.address ^ uint64_t{event.device} << 56).second;
    if (seen_before || event.kind == EventKind::alloc) return;
    Event block = event;
    block.kind = EventKind::alloc;
    block.call_id = 0;
    block.node_sequence = kNoNode;
    block.sequence = 0;
    const auto slot = std::lower_bound(freed_.begin(), freed_.end(), Event{.detail = event.sequence}, by_free);
    if (slot != freed_.end() && slot->detail == event.sequence && slot->address == event.address) block = *slot;
    block.detail = event.detail;  // the stream
    block.flags = 0;
    found_.push_back(block);
  }

  static bool by_free(const Event& a, const Event& b) { return a.detail < b.detail; }

  const TraceHeader& header_;
  uint64_t first_, last_;
  std::vector<Event> freed_;           ///< slots of blocks that were freed since, by the sequence of their free
  std::unordered_set<uint64_t> seen_;  ///< addresses that were allocated or freed
  std::vector<Event> found_;
};

}  // namespace

std::vector<Event> find_initial_blocks(const std::shared_ptr<const InputFile>& file, const TraceHeader& header,
                                       uint64_t first_sequence, uint64_t last_sequence, const EventLog& events) {
  return InitialBlocks(header, first_sequence, last_sequence).find(file, events);
}

}  // namespace oomdiag
