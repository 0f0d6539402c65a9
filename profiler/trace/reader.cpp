#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <unordered_set>

#include "profiler/error.h"
#include "profiler/trace/trace.h"

// Reading a file that anything may have happened to: written by a process that was killed in the middle, cut off by a full
// disk, or no trace at all. The header is checked strictly, the records one by one; a bad record is left out.

namespace oomdiag {

namespace {

/// A file mapped for reading.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info {};
    if (file < 0 || fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
      const std::string reason = file < 0 ? std::strerror(errno) : "not a regular file";
      if (file >= 0) close(file);
      throw Error(ErrorKind::input, "cannot read " + path.string() + ": " + reason);
    }
    bytes_ = static_cast<uint64_t>(info.st_size);
    void* map = bytes_ == 0 ? MAP_FAILED : mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (map != MAP_FAILED) data_ = static_cast<const char*>(map);
  }
  ~MappedFile() {
    if (data_ != nullptr) munmap(const_cast<char*>(data_), bytes_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  uint64_t bytes() const { return data_ == nullptr ? 0 : bytes_; }
  /// `count` values of T at `offset`, fewer where the file ends before.
  template <class T>
  std::span<const T> values(uint64_t offset, uint64_t count) const {
    if (offset >= bytes() || offset % alignof(T) != 0) return {};
    const uint64_t room = (bytes() - offset) / sizeof(T);
    return {reinterpret_cast<const T*>(data_ + offset), std::min(count, room)};
  }

 private:
  const char* data_ = nullptr;
  uint64_t bytes_ = 0;
};

template <size_t N>
std::string text(const char (&field)[N]) {
  return {field, strnlen(field, N)};
}

const TraceHeader& checked_header(const MappedFile& file, const std::filesystem::path& path) {
  const auto headers = file.values<TraceHeader>(0, 1);
  if (headers.empty() || std::memcmp(headers[0].magic, kTraceMagic, sizeof kTraceMagic) != 0) {
    throw Error(ErrorKind::input, path.string() + " is not a trace of oomdiag",
                "give the folder oomdiag-<pid>, its trace, or a report.json");
  }
  const TraceHeader& header = headers[0];
  if (header.version != kTraceVersion) {
    throw Error(ErrorKind::input, path.string() + " is a trace of version " + std::to_string(header.version) +
                                      "; this oomdiag reads version " + std::to_string(kTraceVersion));
  }
  constexpr uint64_t kLimit = uint64_t{1} << 46;  // keeps the sums below from overflowing
  const bool sane = header.header_bytes == kHeaderBytes && header.device_count <= kMaxDevices &&
                    header.names_offset < kLimit && header.names_bytes < kLimit && header.contexts_offset < kLimit &&
                    header.contexts_capacity < kLimit / sizeof(Context) && header.tables_offset < kLimit &&
                    header.slots_per_device < (1u << 28) && header.chunks_offset < kLimit &&
                    header.chunk_bytes > sizeof(ChunkHeader) && header.chunk_bytes < kLimit &&
                    header.chunk_bytes % sizeof(Event) == 0 && header.chunk_capacity < (1u << 28);
  if (!sane) throw Error(ErrorKind::input, path.string() + " is damaged: its header makes no sense");
  return header;
}

ProcessInfo process_of(const TraceHeader& header) {
  return {.pid = header.pid,
          .rank = header.rank,
          .world_size = header.world_size,
          .virtual_device = header.virtual_device != 0,
          .python = header.python != 0,
          .torch_version = text(header.torch_version),
          .allocator_settings = text(header.allocator_settings),
          .command = text(header.command),
          .end_state = header.end_state.load(),
          .steady_steps = header.steady_steps.load(),
          .recorder_failure = text(header.failure),
          .steps_before = header.steps_before,
          .unwatched = header.unwatched != 0,
          .start_time_ns = header.start_time_ns};
}

std::vector<Device> read_devices(const TraceHeader& header) {
  std::vector<Device> devices;
  for (uint32_t d = 0; d < header.device_count; ++d) {
    const DeviceInfo& info = header.devices[d];
    devices.push_back({.name = text(info.name),
                       .total_bytes = info.total_bytes,
                       .compute_major = info.compute_major,
                       .compute_minor = info.compute_minor,
                       .context_bytes = info.context_bytes,
                       .cublas_workspace_bytes = info.cublas_workspace_bytes});
  }
  return devices;
}

std::vector<std::string> read_names(const MappedFile& file, const TraceHeader& header) {
  const auto bytes = file.values<char>(header.names_offset, std::min(header.names_used.load(), header.names_bytes));
  std::vector<std::string> names;
  for (uint64_t at = 0; at + sizeof(uint32_t) <= bytes.size();) {
    uint32_t length = 0;
    std::memcpy(&length, bytes.data() + at, sizeof length);
    at += sizeof length;
    if (length > bytes.size() - at) break;
    names.emplace_back(bytes.data() + at, length);
    at += length;
  }
  if (names.empty()) names.emplace_back();
  return names;
}

std::vector<Context> read_contexts(const MappedFile& file, const TraceHeader& header) {
  const uint64_t count = std::min<uint64_t>(header.context_count.load(), header.contexts_capacity);
  const auto contexts = file.values<Context>(header.contexts_offset, count);
  std::vector<Context> result(contexts.begin(), contexts.end());
  if (result.empty()) result.emplace_back();
  return result;
}

bool is_sound(const Event& event, const TraceHeader& header) {
  return event.sequence != 0 && event.kind != EventKind::none && event.kind <= kLastEventKind &&
         (event.device < header.device_count || header.device_count == 0);
}

std::vector<Event> read_chunks(const MappedFile& file, const TraceHeader& header) {
  std::vector<Event> events;
  const uint64_t used = std::min<uint64_t>(header.chunk_count.load(), header.chunk_capacity);
  for (uint64_t c = 0; c < used; ++c) {
    const uint64_t offset = header.chunks_offset + c * header.chunk_bytes;
    const auto headers = file.values<ChunkHeader>(offset, 1);
    if (headers.empty() || headers[0].first_sequence.load() == 0) continue;
    uint64_t previous = headers[0].first_sequence.load() - 1;
    const uint64_t room = (header.chunk_bytes - sizeof(ChunkHeader)) / sizeof(Event);
    for (const Event& event : file.values<Event>(offset + sizeof(ChunkHeader), room)) {
      if (event.sequence <= previous) break;  // never written, or left over from the chunk's last use
      previous = event.sequence;
      if (is_sound(event, header)) events.push_back(event);
    }
  }
  const auto by_sequence = [](const Event& a, const Event& b) { return a.sequence < b.sequence; };
  if (!std::is_sorted(events.begin(), events.end(), by_sequence)) std::sort(events.begin(), events.end(), by_sequence);
  return events;
}

// Once chunks were taken again, everything before the last missing event is a story with holes: cut it off. A few events
// at the very end may be missing because their threads were killed while they wrote.
void cut_holes(std::vector<Event>& events, const TraceHeader& header) {
  if (header.chunk_count.load() <= header.chunk_capacity || events.empty()) return;
  constexpr uint64_t kTorn = 64;
  const uint64_t last = events.back().sequence;
  size_t first = events.size() - 1;
  while (first > 0) {
    const bool hole = events[first].sequence != events[first - 1].sequence + 1;
    if (hole && events[first].sequence + kTorn < last) break;
    --first;
  }
  events.erase(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(first));
}

// The blocks that were alive before the first event: those in the tables that are older, and those whose free we still see.
std::vector<Event> read_initial(const MappedFile& file, const TraceHeader& header, const std::vector<Event>& events) {
  const uint64_t first = events.empty() ? ~uint64_t{0} : events.front().sequence;
  std::vector<Event> initial;
  for (uint32_t d = 0; d < header.device_count; ++d) {
    const uint64_t offset = header.tables_offset + d * header.slots_per_device * sizeof(Event);
    for (const Event& slot : file.values<Event>(offset, header.slots_per_device)) {
      if (slot.kind == EventKind::alloc && slot.device == d && is_sound(slot, header) && slot.sequence < first) {
        initial.push_back(slot);
      }
    }
  }
  std::unordered_set<uint64_t> allocated;
  for (const Event& event : events) {
    if (event.kind == EventKind::alloc) allocated.insert(event.address ^ uint64_t{event.device} << 56);
    if (event.kind != EventKind::free_requested) continue;
    if (allocated.contains(event.address ^ uint64_t{event.device} << 56)) continue;
    allocated.insert(event.address ^ uint64_t{event.device} << 56);
    Event block = event;  // who allocated it is no longer known
    block.kind = EventKind::alloc;
    block.context = block.op_serial = 0;
    block.node_sequence = kNoNode;
    block.sequence = 0;
    initial.push_back(block);
  }
  std::sort(initial.begin(), initial.end(), [](const Event& a, const Event& b) { return a.sequence < b.sequence; });
  return initial;
}

}  // namespace

std::string_view Trace::name(uint64_t index) const {
  return index < names.size() ? std::string_view(names[index]) : std::string_view();
}

const Context& Trace::context(uint32_t index) const {
  static constexpr Context kNothing;
  return index < contexts.size() ? contexts[index] : kNothing;
}

int64_t Trace::time_ns(const Event& event) const {
  if (event.time < start_ticks) return 0;
  return static_cast<int64_t>(static_cast<double>(event.time - start_ticks) * ns_per_tick);
}

ProcessInfo read_process(const std::filesystem::path& path) {
  const MappedFile file(path);
  return process_of(checked_header(file, path));
}

Trace read_trace(const std::filesystem::path& path) {
  const MappedFile file(path);
  const TraceHeader& header = checked_header(file, path);
  Trace trace{.process = process_of(header),
              .devices = read_devices(header),
              .names = read_names(file, header),
              .contexts = read_contexts(file, header),
              .events = read_chunks(file, header),
              .initial = {},
              .dropped_events = header.dropped_events.load(),
              .dropped_blocks = header.dropped_slots.load(),
              .start_ticks = header.start_ticks};
  cut_holes(trace.events, header);
  if (!trace.events.empty() && trace.events.front().sequence > 1) {
    trace.overwritten_events = trace.events.front().sequence - 1;
    trace.initial = read_initial(file, header, trace.events);
  }
  const uint64_t ticks = header.end_ticks.load() - header.start_ticks;
  const uint64_t time_ns = header.end_time_ns.load() - header.start_time_ns;
  if (header.end_ticks.load() > header.start_ticks && time_ns > 0) {
    trace.ns_per_tick = static_cast<double>(time_ns) / static_cast<double>(ticks);
  }
  return trace;
}

}  // namespace oomdiag
