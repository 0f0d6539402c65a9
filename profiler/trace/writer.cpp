#include "profiler/trace/writer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>

#include "profiler/error.h"
#include "profiler/trace/evenly_spaced.h"
#include "profiler/trace/store.h"

namespace oomdiag {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kReserveStep = 256 << 10;  // of names, contexts and slots at a time

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

uint64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// The chunk that this thread writes to. Given back when the thread ends.
struct HeldChunk {
  ChunkHeader* header = nullptr;

  ~HeldChunk() { give_back(); }
  void give_back() noexcept;
};
thread_local HeldChunk held_owner;
// Reading this one costs no guard and no call: it lies in the static block of thread-local memory.
struct HeldSlots {
  Event* first;
  Event* next;
  Event* end;
};
[[gnu::tls_model("initial-exec")]] thread_local HeldSlots held{nullptr, nullptr, nullptr};

void HeldChunk::give_back() noexcept {
  held = {nullptr, nullptr, nullptr};
  if (header != nullptr) header->holder.store(0, std::memory_order_release);
  header = nullptr;
}

}  // namespace

uint64_t read_ticks() noexcept {
#ifdef __x86_64__
  return __rdtsc();
#else
  return monotonic_ns();
#endif
}

TraceWriter::TraceWriter(const std::filesystem::path& file, uint32_t device_count, const TraceBudget& budget) {
  const uint32_t devices = std::min(device_count, kMaxDevices);
  const auto chunk_bytes = round_up(static_cast<uint64_t>(budget.chunk_bytes), kPage);
  TraceHeader layout{};
  layout.names_offset = kHeaderBytes;
  layout.names_bytes = round_up(static_cast<uint64_t>(budget.names_bytes), kPage);
  layout.contexts_offset = layout.names_offset + layout.names_bytes;
  layout.contexts_capacity = budget.contexts;
  layout.steps_offset = round_up(layout.contexts_offset + budget.contexts * sizeof(Context), kPage);
  layout.steps_capacity = std::max(budget.steps, 2u) / 2 * 2;
  layout.kept_offset = round_up(layout.steps_offset + layout.steps_capacity * sizeof(uint64_t), kPage);
  layout.kept_capacity = std::max(budget.kept_events, 1u);
  layout.tables_offset = round_up(layout.kept_offset + layout.kept_capacity * sizeof(Event), kPage);
  layout.slots_per_device = budget.slots_per_device;
  layout.chunks_offset = round_up(layout.tables_offset + devices * budget.slots_per_device * sizeof(Event), kPage);
  layout.chunk_bytes = chunk_bytes;
  layout.chunk_capacity = std::max<uint64_t>(static_cast<uint64_t>(budget.event_bytes) / chunk_bytes, 2);
  layout.file_bytes = layout.chunks_offset + layout.chunk_capacity * chunk_bytes;

  const auto refuse = [&](const char* what) -> Error {
    const std::string reason = std::strerror(errno);
    if (map_ != nullptr) munmap(map_, layout.file_bytes);
    if (file_ >= 0) {
      close(file_);
      unlink(file.c_str());
    }
    return {ErrorKind::environment, std::string("cannot ") + what + " the trace " + file.string() + ": " + reason,
            "choose a folder with room by --folder"};
  };
  rlimit limit{};  // beyond it the kernel does not refuse, it sends SIGXFSZ
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < layout.file_bytes) {
    errno = EFBIG;
    throw refuse("create");
  }
  file_ = open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file_ < 0) throw refuse("create");
  if (ftruncate(file_, static_cast<off_t>(layout.file_bytes)) != 0) throw refuse("size");
  void* map = mmap(nullptr, layout.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (map == MAP_FAILED) throw refuse("map");
  map_ = static_cast<char*>(map);
  if (!reserve(0, kHeaderBytes)) throw refuse("reserve room for");

  header_ = new (map_) TraceHeader;
  header_->names_offset = layout.names_offset, header_->names_bytes = layout.names_bytes;
  header_->contexts_offset = layout.contexts_offset, header_->contexts_capacity = layout.contexts_capacity;
  header_->steps_offset = layout.steps_offset, header_->steps_capacity = layout.steps_capacity;
  header_->kept_offset = layout.kept_offset, header_->kept_capacity = layout.kept_capacity;
  header_->tables_offset = layout.tables_offset, header_->slots_per_device = layout.slots_per_device;
  header_->chunks_offset = layout.chunks_offset, header_->chunk_bytes = layout.chunk_bytes;
  header_->chunk_capacity = layout.chunk_capacity;
  header_->file_bytes = layout.file_bytes;
  header_->device_count = devices;
  header_->pid = getpid();
  header_->start_ticks = read_ticks();
  header_->start_time_ns = monotonic_ns();
  mark_time();
  for (uint32_t d = 0; d < devices; ++d) {
    auto* slots = reinterpret_cast<Event*>(at(header_->tables_offset)) + d * header_->slots_per_device;
    tables_[d] = std::make_unique<LiveTable>(slots, budget.slots_per_device, 0);
  }
  intern(std::string_view{});
  intern(Context{});
}

TraceWriter::~TraceWriter() {
  held_owner.give_back();
  const uint64_t bytes = header_->file_bytes;
  munmap(map_, bytes);
  close(file_);
}

void TraceWriter::publish() {
  header_->version = kTraceVersion;
  header_->header_bytes = kHeaderBytes;
  std::atomic_signal_fence(std::memory_order_seq_cst);
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

// A store into a page that a full disk cannot hold is a SIGBUS: take the room first.
bool TraceWriter::reserve(uint64_t offset, uint64_t bytes) noexcept {
  errno = posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  return errno == 0;
}

uint64_t TraceWriter::write(Event& event) noexcept {
  if (!on()) return 0;
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

// Should another thread's place still wait, this one is only told by the event itself.
void TraceWriter::post_late_place(const Event& written, uint32_t context) noexcept {
  if (written.device >= header_->device_count) return;
  LatePlace& late = late_places_[written.device];
  auto empty = LatePlace::State::empty;
  if (!late.state.compare_exchange_strong(empty, LatePlace::State::being_filled, std::memory_order_acquire)) return;
  late.address = written.address;
  late.sequence = written.sequence;
  late.context = context;
  late.state.store(LatePlace::State::waiting, std::memory_order_release);
}

// Under the allocator's lock of this device.
void TraceWriter::take_late_place(uint32_t device) noexcept {
  LatePlace& late = late_places_[device];
  if (late.state.load(std::memory_order_acquire) != LatePlace::State::waiting) [[likely]]
    return;
  tables_[device]->place(late.address, late.sequence, late.context);
  late.state.store(LatePlace::State::empty, std::memory_order_release);
}

bool TraceWriter::take_chunk() noexcept {
  held_owner.give_back();
  for (uint64_t tries = 0; tries < header_->chunk_capacity; ++tries) {
    const uint64_t taken = header_->chunk_count.fetch_add(1, std::memory_order_relaxed);
    const uint64_t offset = header_->chunks_offset + taken % header_->chunk_capacity * header_->chunk_bytes;
    if (taken < header_->chunk_capacity && !reserve(offset, header_->chunk_bytes)) {
      fail("no room left on the disk of the trace");
      return false;
    }
    auto* chunk = reinterpret_cast<ChunkHeader*>(at(offset));
    uint32_t nobody = 0;
    if (!chunk->holder.compare_exchange_strong(nobody, 1, std::memory_order_acquire)) continue;
    chunk->first_sequence.store(header_->last_sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    held_owner.header = chunk;
    // One system call here instead of a page fault for every 64 events. Older kernels do not know it: then the faults.
    if (taken < header_->chunk_capacity) madvise(chunk, header_->chunk_bytes, MADV_POPULATE_WRITE);
    held.first = held.next = reinterpret_cast<Event*>(chunk + 1);
    held.end = held.next + (header_->chunk_bytes - sizeof(ChunkHeader)) / sizeof(Event);
    return true;
  }
  header_->dropped_events.fetch_add(1, std::memory_order_relaxed);
  return false;
}

void TraceWriter::add_block(const Event& alloc) noexcept {
  if (!on() || alloc.device >= header_->device_count) return;
  take_late_place(alloc.device);
  LiveTable& table = *tables_[alloc.device];
  if (table.used() >= table.reserved() && table.reserved() < table.capacity()) {
    const uint64_t first =
        header_->tables_offset + (alloc.device * header_->slots_per_device + table.reserved()) * sizeof(Event);
    const uint64_t room = std::min<uint64_t>(kReserveStep / sizeof(Event), table.capacity() - table.reserved());
    if (!reserve(first, room * sizeof(Event))) return fail("no room left on the disk of the trace");
    table.set_reserved(table.reserved() + static_cast<uint32_t>(room));
  }
  if (!table.insert(alloc)) header_->dropped_slots.fetch_add(1, std::memory_order_relaxed);
}

void TraceWriter::remove_block(uint32_t device, uint64_t address, uint64_t free_sequence) noexcept {
  if (!on() || device >= header_->device_count) return;
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
  if (place >= kept_reserved_) {
    const uint64_t room = std::min(kReserveStep, header_->kept_capacity * sizeof(Event) - kept_reserved_);
    if (!reserve(header_->kept_offset + kept_reserved_, room)) return fail("no room left on the disk of the trace");
    kept_reserved_ += room;
  }
  store_event(*reinterpret_cast<Event*>(at(header_->kept_offset + place)), event);
  header_->kept_count.store(count + 1, std::memory_order_release);
}

// Of a list that is full every other entry is dropped: so it lasts for any number of steps.
void TraceWriter::end_step(uint64_t events) noexcept {
  const std::lock_guard lock(stepping_);
  uint32_t count = header_->step_count.load(std::memory_order_relaxed);
  if (!on() || steps_ended_++ % header_->step_stride.load(std::memory_order_relaxed) != 0) return;
  if (count == header_->steps_capacity) {
    count = static_cast<uint32_t>(keep_every_second(std::span(steps(), count)));
    header_->step_stride.store(header_->step_stride.load() * 2, std::memory_order_relaxed);
  } else if (count * sizeof(uint64_t) >= steps_reserved_) {
    const uint64_t room = std::min(kReserveStep, header_->steps_capacity * sizeof(uint64_t) - steps_reserved_);
    if (!reserve(header_->steps_offset + steps_reserved_, room)) return fail("no room left on the disk of the trace");
    steps_reserved_ += room;
  }
  steps()[count] = events;
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
  if (on() && device < header_->device_count) tables_[device]->clear();
}

void TraceWriter::mark_time() noexcept {
  header_->end_ticks.store(read_ticks(), std::memory_order_relaxed);
  header_->end_time_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

void TraceWriter::finish() noexcept {
  if (!on()) return;
  mark_time();
  header_->end_state.store(EndState::exited, std::memory_order_release);
}

// --- interning ---

size_t TraceWriter::ContextHash::operator()(const Context& context) const noexcept {
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&context), sizeof context});
}

// Record: 4 bytes of length, then the bytes. The index of a name is its place in the order of records.
uint64_t TraceWriter::append_name(std::string_view name) {
  const uint64_t used = header_->names_used.load(std::memory_order_relaxed);
  const uint64_t end = used + sizeof(uint32_t) + name.size();
  if (end > header_->names_bytes) return 0;
  if (end > names_reserved_) {
    const uint64_t room =
        std::min(round_up(end - names_reserved_, kReserveStep), header_->names_bytes - names_reserved_);
    if (!reserve(header_->names_offset + names_reserved_, room))
      return fail("no room left on the disk of the trace"), 0;
    names_reserved_ += room;
  }
  const auto length = static_cast<uint32_t>(name.size());
  std::memcpy(at(header_->names_offset + used), &length, sizeof length);
  if (length != 0) std::memcpy(at(header_->names_offset + used + sizeof length), name.data(), length);
  header_->names_used.store(end, std::memory_order_release);
  return end;
}

uint32_t TraceWriter::intern(std::string_view name) {
  name = name.substr(0, 4096);
  const std::lock_guard lock(interning_);
  const auto [entry, fresh] = names_.try_emplace(std::string(name), static_cast<uint32_t>(names_.size()));
  if (!fresh) return entry->second;
  if (on() && append_name(name) != 0) return entry->second;
  names_.erase(entry);
  header_->dropped_names.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

uint32_t TraceWriter::intern(const Context& context) {
  const std::lock_guard lock(interning_);
  const auto [entry, fresh] = contexts_.try_emplace(context, static_cast<uint32_t>(contexts_.size()));
  if (!fresh) return entry->second;
  const uint64_t end = (entry->second + 1) * sizeof(Context);
  bool room = on() && entry->second < header_->contexts_capacity;
  if (room && end > contexts_reserved_) {
    room = reserve(header_->contexts_offset + contexts_reserved_, kReserveStep);
    contexts_reserved_ += kReserveStep;
  }
  if (!room) {
    contexts_.erase(entry);
    header_->dropped_names.fetch_add(1, std::memory_order_relaxed);
    return 0;
  }
  std::memcpy(at(header_->contexts_offset + entry->second * sizeof(Context)), &context, sizeof context);
  header_->context_count.store(entry->second + 1, std::memory_order_release);
  return entry->second;
}

}  // namespace oomdiag
