#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string_view>

#include "profiler/event.h"
#include "profiler/trace/chunk_list.h"
#include "profiler/trace/format.h"
#include "profiler/trace/interner.h"
#include "profiler/trace/live_table.h"
#include "profiler/trace/shared_file.h"

namespace oomdiag {

/// How large a trace may become.
struct TraceBudget {
  int64_t event_bytes = 256 << 20;      ///< all chunks together; the oldest is overwritten
  int64_t chunk_bytes = 64 << 10;       ///< what one thread takes at a time
  int64_t names_bytes = 8 << 20;        ///< interned names
  uint32_t contexts = 1 << 17;          ///< interned contexts
  uint32_t steps = 1 << 20;             ///< listed one by one; of longer runs every 2nd, 4th, …
  uint32_t kept_events = 1 << 15;       ///< names of parameters and buffers, stacks of lines
  uint32_t slots_per_device = 1 << 18;  ///< live blocks; a leak of one a step fills them in 260 000 steps

  bool operator==(const TraceBudget&) const = default;
};

/// Writes the trace of this process. One per process; never destroyed while threads may still write.
///
/// `write`, `add_block` and `remove_block` run inside the caching allocator, under its lock: they neither lock nor allocate
/// nor throw. Once anything fails (a full disk), the writer is off for good and everything is a no-op.
class TraceWriter {
 public:
  /// Creates `file`, which must not exist, for `device_count` devices. Throws Error(environment).
  TraceWriter(const std::filesystem::path& file, uint32_t device_count, const TraceBudget& budget = {});
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  /// The header in the file. Fill in the plain fields, then call `publish`.
  TraceHeader& header() { return *header_; }
  /// Makes the file a trace that readers accept.
  void publish();

  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  /// Switches the writer off and says why in the header. Any thread.
  void fail(const char* reason) noexcept;

  /// In a child of fork, on its only thread: the trace stays its parent's. The writer is off, nothing that is stored by
  /// mistake reaches the file, and the chunk that this thread holds is not given back. Neither locks nor allocates.
  void leave_to_parent() noexcept;

  /// Writes one event and gives it its sequence, 0 if it could not be written.
  uint64_t write(Event& event) noexcept;
  /// If the last event of this thread requests the free of this block, says in it that the free is complete.
  bool complete_last_free(uint32_t device, uint64_t address) noexcept;
  /// The place of the last event of this thread, null if there is none.
  Event* last_written() noexcept;
  /// Says late where an event of this thread happened, unless it has been overwritten since. The table of live blocks hears
  /// of it when the allocator next adds or removes a block of that device.
  void place(Event* written, uint64_t sequence, uint32_t context) noexcept;
  /// Remembers the block of an alloc event that `write` numbered `event.sequence`.
  void add_block(const Event& alloc) noexcept;
  /// Says that `add_block` or `remove_block` will be asked for the block at this address in a moment. Under the same lock.
  [[gnu::always_inline]] void expect_block(uint32_t device, uint64_t address, bool is_new) const noexcept {
    if (device < device_count_) tables_[device]->expect(address, is_new);
  }
  /// Takes it out again; `free_sequence` is that of its free_requested, which this thread has just written and which hears
  /// who allocated the block: the alloc event may be overwritten before it.
  void remove_block(uint32_t device, uint64_t address, uint64_t free_sequence) noexcept;
  /// Forgets all blocks of a device. Under its lock, like the two above.
  void forget_blocks(uint32_t device) noexcept;

  /// The index of this name or context, the same for equal ones; 0 when the table is full. Locks: not for the
  /// allocator.
  uint32_t intern(std::string_view name) { return interner_.intern(name); }
  uint32_t intern(const Context& context) { return interner_.intern(context); }

  /// Writes an event and keeps a copy that is not overwritten with the rest. Locks: not for the allocator.
  void write_and_keep(Event& event) noexcept;
  /// Grows with what is written; when it has grown by one, everything older is overwritten.
  double times_overwritten() const noexcept {
    return static_cast<double>(header_->chunk_count.load(std::memory_order_relaxed)) /
           static_cast<double>(header_->chunk_capacity);
  }

  /// Lists that a step ends, with the last of `events` events. Locks: not for the allocator.
  void end_step(uint64_t events) noexcept;
  /// Says that steps end with an optimizer's step, and forgets those that were counted otherwise.
  void count_steps_by_optimizer() noexcept;

  /// Notes the time now, so that ticks can be converted. Cheap; called at steps and at the end.
  void mark_time() noexcept;
  /// Says that the process reached its end.
  void finish() noexcept;

 private:
  /// A place that came late, on its way to the table of live blocks, which only the holder of the allocator's lock may touch.
  struct LatePlace {
    enum class State : uint8_t { empty, being_filled, waiting };
    std::atomic<State> state = State::empty;
    uint64_t address = 0;
    uint64_t sequence = 0;
    uint32_t context = 0;
  };
  void post_late_place(const Event& written, uint32_t context) noexcept;
  void take_late_place(uint32_t device) noexcept;
  [[gnu::cold]] bool reserve_slots(uint32_t device, LiveTable& table) noexcept;
  [[gnu::cold]] bool fail_unless_enough(DiskSpace space) noexcept;
  [[gnu::cold]] bool look_at_disk() noexcept;
  [[gnu::cold]] bool take_chunk() noexcept;

  SharedFile file_;
  TraceHeader* header_;  ///< in the file
  uint32_t device_count_;
  std::atomic<bool> on_ = true;
  std::atomic<uint32_t> places_waiting_ = 0;        ///< of late_places_
  std::atomic<uint64_t> next_look_ = ~uint64_t{0};  ///< at the disk, in ticks; never where it keeps what was reserved
  std::optional<LiveTable> tables_[kMaxDevices];
  LatePlace late_places_[kMaxDevices];
  Interner interner_;
  ChunkList chunks_;

  std::mutex stepping_, keeping_;
  uint64_t steps_ended_ = 0;
  FileSection steps_, kept_;
};

}  // namespace oomdiag
