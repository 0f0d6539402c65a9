#include "profiler/trace/writer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>

#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/trace/chunk_list.h"
#include "profiler/trace/evenly_spaced.h"
#include "profiler/trace/fences.h"
#include "profiler/trace/format.h"
#include "profiler/trace/shared_file.h"
#include "profiler/trace/store.h"
#include "profiler/trace/ticks.h"

namespace oomdiag {

namespace {

constexpr uint64_t kReservedSlots = 4096;  // at a time
constexpr uint64_t kSectionUnit = 4096;    // bytes that a section of the file is a multiple of
constexpr uint64_t kLooksPerSecond = 3;    // at the disk, about

uint64_t time_of_next_look() noexcept { return read_ticks() + ticks_per_second() / kLooksPerSecond; }

// The chunk that this thread writes to. It has no destructor: exit handlers write after the main thread's destructors ran.
struct HeldChunk {
  ChunkList* list = nullptr;
  uint32_t chunk = 0;
  Event* slots = nullptr;

  void release() noexcept;
  /// It is another process's.
  void disown() noexcept { list = nullptr; }
};
thread_local HeldChunk held_owner;
// Gives it back when the thread ends.
struct ThreadEnd {
  bool awaited = false;
  ~ThreadEnd() { held_owner.release(); }
};
thread_local ThreadEnd thread_end;
// Reading this one costs no guard and no call: it lies in the static block of thread-local memory.
struct HeldSlots {
  Event* first;  ///< of this thread
  Event* next;
  Event* end;
};
[[gnu::tls_model("initial-exec")]] thread_local HeldSlots held{nullptr, nullptr, nullptr};

void HeldChunk::release() noexcept {
  if (list != nullptr) {
    const auto used = static_cast<uint32_t>(held.next - slots);
    list->release(chunk, used, used == 0 ? 0 : held.next[-1].sequence);
  }
  held = {nullptr, nullptr, nullptr};
  list = nullptr;
}

const char* describe_shortage(DiskSpace space) noexcept {
  switch (space) {
    case DiskSpace::none:
      return "no space left on the disk of the trace";
    case DiskSpace::unreachable:
      return "the trace cannot be opened any more under its name";
    case DiskSpace::enough:
      break;
  }
  return "";
}

// Says in the header where everything goes.
TraceHeader& lay_out(TraceHeader& header, uint32_t device_count, const TraceBudget& budget) {
  header.device_count = std::min(device_count, kMaxDevices);
  header.names_offset = round_up(kHeaderBytes, host_page_bytes());  // what lies behind the header: leave_to_parent
  header.names_bytes = round_up(static_cast<uint64_t>(budget.names_bytes), kSectionUnit);
  header.contexts_offset = header.names_offset + header.names_bytes;
  header.contexts_capacity = budget.contexts;
  header.steps_offset = round_up(header.contexts_offset + budget.contexts * sizeof(Context), kSectionUnit);
  header.steps_capacity = uint64_t{std::max(budget.steps, 2u)} / 2 * 2;
  header.kept_offset = round_up(header.steps_offset + header.steps_capacity * sizeof(uint64_t), kSectionUnit);
  header.kept_capacity = std::max(budget.kept_events, 1u);
  header.tables_offset = round_up(header.kept_offset + header.kept_capacity * sizeof(Event), kSectionUnit);
  header.slots_per_device = budget.slots_per_device;
  const uint64_t slots = uint64_t{header.device_count} * header.slots_per_device;
  header.chunks_offset = round_up(header.tables_offset + slots * sizeof(Event), kSectionUnit);
  header.chunk_bytes = round_up(static_cast<uint64_t>(budget.chunk_bytes), kSectionUnit);
  header.chunk_capacity = std::max<uint64_t>(static_cast<uint64_t>(budget.event_bytes) / header.chunk_bytes, 2);
  header.file_bytes = header.chunks_offset + header.chunk_capacity * header.chunk_bytes;
  return header;
}

uint32_t slots_of(const TraceHeader& header) {
  return static_cast<uint32_t>((header.chunk_bytes - sizeof(ChunkHeader)) / sizeof(Event));
}

uint64_t file_bytes_of(uint32_t device_count, const TraceBudget& budget) {
  TraceHeader header;
  return lay_out(header, device_count, budget).file_bytes;
}

/// The beginning of the file. Throws Error(environment) if there is none.
char* require(SharedFile& file) {
  int error = file.error();
  if (file) {
    const bool is_full = file.may_lose_room() && file.find_space() == DiskSpace::none;
    if (!is_full && file.reserve(0, kHeaderBytes) == DiskSpace::enough) return file.at(0);
    error = ENOSPC;
    file.remove();
  }
  throw Error(ErrorKind::environment, "cannot create the trace " + file.path() + ": " + std::strerror(error),
              "choose a folder with free space by --folder");
}

}  // namespace

TraceWriter::TraceWriter(const std::filesystem::path& file, uint32_t device_count, const TraceBudget& budget)
    : file_(file, file_bytes_of(device_count, budget), SharedFile::Opening::create),
      header_(&lay_out(*new (require(file_)) TraceHeader, device_count, budget)),
      device_count_(header_->device_count),
      interner_(file_, *header_),
      chunks_(static_cast<uint32_t>(header_->chunk_capacity), slots_of(*header_)),
      steps_{header_->steps_offset, header_->steps_capacity * sizeof(uint64_t)},
      kept_{header_->kept_offset, header_->kept_capacity * sizeof(Event)} {
  if (file_.may_lose_room()) next_look_.store(time_of_next_look());
  header_->pid = getpid();
  header_->start_ticks = read_ticks();
  header_->start_time_ns = monotonic_ns();
  mark_time();
  for (uint32_t d = 0; d < header_->device_count; ++d) {
    auto* slots = reinterpret_cast<Event*>(file_.at(header_->tables_offset)) + d * header_->slots_per_device;
    tables_[d].emplace(slots, budget.slots_per_device, 0u);
  }
}

TraceWriter::~TraceWriter() { held_owner.release(); }

void TraceWriter::publish() {
  header_->version = kTraceVersion;
  header_->header_bytes = kHeaderBytes;
  order_stores();
  std::memcpy(header_->magic, kTraceMagic, sizeof kTraceMagic);
}

void TraceWriter::fail(const char* reason) noexcept {
  if (!on_.exchange(false)) return;
  std::strncpy(header_->failure, reason, sizeof header_->failure - 1);
  dprintf(STDERR_FILENO, "oomdiag: warning: recording stopped: %s; the program runs on\n",
          reason);  // neither locks nor allocates
  header_->end_state.store(EndState::recorder_failed);
  mark_time();
}

void TraceWriter::leave_to_parent() noexcept {
  on_.store(false);
  held = {nullptr, nullptr, nullptr};
  held_owner.disown();
  file_.become_private(header_->names_offset);
}

bool TraceWriter::fail_unless_enough(DiskSpace space) noexcept {
  if (space == DiskSpace::enough) return true;
  fail(describe_shortage(space));
  return false;
}

// A page that is written back by the kernel is one that a store needs space for. So the thread that stores has looked a moment
// ago, and on a disk that is nearly full, or that cannot be looked at, nothing is stored to the file any more, by any
// thread: not even why.
bool TraceWriter::look_at_disk() noexcept {
  next_look_.store(time_of_next_look(), std::memory_order_relaxed);
  const DiskSpace space = file_.find_space();
  if (space == DiskSpace::enough) return true;
  file_.become_private(header_->names_offset);
  fail(describe_shortage(space));
  file_.write_out(0, kHeaderBytes);
  return false;
}

[[gnu::hot]] uint64_t TraceWriter::write(Event& event) noexcept {
  if (!on()) return 0;
  if (event.time >= next_look_.load(std::memory_order_relaxed) && !look_at_disk()) return 0;
  if (held.next == held.end && !take_chunk()) return 0;
  event.sequence = header_->last_sequence.fetch_add(1, std::memory_order_relaxed) + 1;
  // The counter above is a locked instruction: it waits for the stores of the event before, which are slow where their
  // cache line has to be fetched first. So the lines of later events are asked for now.
  __builtin_prefetch(held.next + 8, 1);
  store_event(*held.next++, event);
  return event.sequence;
}

bool TraceWriter::complete_last_free(uint32_t device, uint64_t address) noexcept {
  if (!on() || held.next == held.first) return false;
  Event& last = held.next[-1];
  if (last.kind != EventKind::free_requested || last.address != address || last.device != device) return false;
  std::atomic_ref(last.flags).store(kFreeCompleted, std::memory_order_relaxed);
  return true;
}

Event* TraceWriter::last_written() noexcept { return held.next == held.first ? nullptr : held.next - 1; }

void TraceWriter::place(Event* written, uint64_t sequence, uint32_t context) noexcept {
  if (!on() || written->sequence != sequence) return;
  std::atomic_ref(written->context).store(context, std::memory_order_relaxed);
  if (written->kind == EventKind::alloc) post_late_place(*written, context);
}

// Should another thread's place still wait, this one is recorded by the event itself only.
void TraceWriter::post_late_place(const Event& written, uint32_t context) noexcept {
  if (written.device >= device_count_) return;
  LatePlace& late = late_places_[written.device];
  auto empty = LatePlace::State::empty;
  if (!late.state.compare_exchange_strong(empty, LatePlace::State::being_filled, std::memory_order_acquire)) return;
  late.address = written.address;
  late.sequence = written.sequence;
  late.context = context;
  late.state.store(LatePlace::State::waiting, std::memory_order_release);
  places_waiting_.fetch_add(1, std::memory_order_relaxed);
}

// Under the allocator's lock of this device.
void TraceWriter::take_late_place(uint32_t device) noexcept {
  if (places_waiting_.load(std::memory_order_relaxed) == 0) [[likely]]
    return;
  LatePlace& late = late_places_[device];
  if (late.state.load(std::memory_order_acquire) != LatePlace::State::waiting) return;
  tables_[device]->place(late.address, late.sequence, late.context);
  places_waiting_.fetch_sub(1, std::memory_order_relaxed);
  late.state.store(LatePlace::State::empty, std::memory_order_release);
}

bool TraceWriter::take_chunk() noexcept {
  held_owner.release();
  const auto taken = chunks_.take();
  if (!taken) {
    header_->dropped_events.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  const uint64_t offset = header_->chunks_offset + taken->chunk * header_->chunk_bytes;
  if (taken->is_fresh && !fail_unless_enough(file_.reserve(offset, header_->chunk_bytes))) return false;
  auto* chunk = reinterpret_cast<ChunkHeader*>(file_.at(offset));
  if (taken->used == 0) {
    header_->chunk_count.fetch_add(1, std::memory_order_relaxed);
    chunk->first_sequence.store(header_->last_sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  thread_end.awaited = true;
  held_owner.list = &chunks_;
  held_owner.chunk = taken->chunk;
  held_owner.slots = reinterpret_cast<Event*>(chunk + 1);
  held.first = held.next = held_owner.slots + taken->used;
  held.end = held_owner.slots + slots_of(*header_);
  return true;
}

[[gnu::hot]] void TraceWriter::add_block(const Event& alloc) noexcept {
  if (!on() || alloc.device >= device_count_) return;
  take_late_place(alloc.device);
  LiveTable& table = *tables_[alloc.device];
  const bool needs_room = table.used() >= table.reserved() && table.reserved() < table.capacity();
  if (needs_room && !reserve_slots(alloc.device, table)) return;
  if (!table.insert(alloc)) header_->dropped_slots.fetch_add(1, std::memory_order_relaxed);
}

bool TraceWriter::reserve_slots(uint32_t device, LiveTable& table) noexcept {
  const uint64_t first =
      header_->tables_offset + (device * header_->slots_per_device + table.reserved()) * sizeof(Event);
  const uint64_t space = std::min<uint64_t>(kReservedSlots, table.capacity() - table.reserved());
  if (!fail_unless_enough(file_.reserve(first, space * sizeof(Event)))) return false;
  table.set_reserved(table.reserved() + static_cast<uint32_t>(space));
  return true;
}

[[gnu::hot]] void TraceWriter::remove_block(uint32_t device, uint64_t address, uint64_t free_sequence) noexcept {
  if (!on() || device >= device_count_) return;
  take_late_place(device);
  const uint32_t maker = tables_[device]->erase(address, free_sequence);
  Event* last = last_written();
  if (last != nullptr && last->sequence == free_sequence) {
    std::atomic_ref(last->context).store(maker, std::memory_order_relaxed);
  }
}

void TraceWriter::write_and_keep(Event& event) noexcept {
  write(event);
  const std::lock_guard lock(keeping_);
  const uint64_t count = header_->kept_count.load(std::memory_order_relaxed);
  const uint64_t place = count % header_->kept_capacity * sizeof(Event);
  if (!on() || event.sequence == 0) return;
  if (!fail_unless_enough(kept_.reserve_up_to(file_, place + sizeof(Event)))) return;
  store_event(*reinterpret_cast<Event*>(file_.at(kept_.offset + place)), event);
  header_->kept_count.store(count + 1, std::memory_order_release);
}

// Of a list that is full every other entry is dropped: so it lasts for any number of steps.
void TraceWriter::end_step(uint64_t events) noexcept {
  const std::lock_guard lock(stepping_);
  auto* steps = reinterpret_cast<uint64_t*>(file_.at(steps_.offset));
  uint32_t count = header_->step_count.load(std::memory_order_relaxed);
  if (!on() || steps_ended_++ % header_->step_stride.load(std::memory_order_relaxed) != 0) return;
  if (count == header_->steps_capacity) {
    count = static_cast<uint32_t>(keep_every_second(std::span(steps, count)));
    header_->step_stride.store(header_->step_stride.load() * 2, std::memory_order_relaxed);
  } else if (!fail_unless_enough(steps_.reserve_up_to(file_, (count + uint64_t{1}) * sizeof(uint64_t)))) {
    return;
  }
  steps[count] = events;
  header_->step_count.store(count + 1, std::memory_order_release);
}

void TraceWriter::count_steps_by_optimizer() noexcept {
  const std::lock_guard lock(stepping_);
  if (header_->steps_by_optimizer.exchange(1) != 0) return;
  header_->step_count.store(0, std::memory_order_release);
  header_->step_stride.store(1);
  steps_ended_ = 0;
}

void TraceWriter::forget_blocks(uint32_t device) noexcept {
  if (on() && device < device_count_) tables_[device]->clear();
}

void TraceWriter::mark_time() noexcept {
  if (read_ticks() >= next_look_.load(std::memory_order_relaxed) && on() && !look_at_disk()) return;
  header_->end_ticks.store(read_ticks(), std::memory_order_relaxed);
  header_->end_time_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

void TraceWriter::finish() noexcept {
  if (!on()) return;
  mark_time();
  header_->end_state.store(EndState::exited, std::memory_order_release);
}

}  // namespace oomdiag
