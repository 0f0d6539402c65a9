#include <algorithm>
#include <cstring>

#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/format.h"
#include "profiler/trace/initial_blocks.h"
#include "profiler/trace/order.h"
#include "profiler/trace/read_header.h"
#include "profiler/trace/trace.h"
#include "profiler/trace/unnamed_file.h"

// Reading a file that anything may have happened to: written by a process that was killed in the middle or still writes,
// cut off by a full disk, or no trace at all. The header is checked strictly, the records one by one; a bad record is left
// out. Everything is copied by read(2): a mapping of a file that shrinks meanwhile would be a SIGBUS.

namespace oomdiag {

namespace {

/// Up to `count` values of T at `offset`, fewer where the file ends before.
template <class T>
std::vector<T> read_values(const InputFile& file, uint64_t offset, uint64_t count) {
  if (offset >= file.bytes()) return {};
  std::vector<T> values(std::min(count, (file.bytes() - offset) / sizeof(T)));
  file.read(offset, values.data(), values.size() * sizeof(T));
  return values;
}

// A damaged header may say anything; these are some times what a recorder writes (TraceBudget).
constexpr uint64_t kMaxContexts = uint64_t{1} << 19;
constexpr uint64_t kMaxKept = uint64_t{1} << 17;
constexpr uint64_t kMaxSteps = uint64_t{1} << 22;
constexpr uint32_t kMaxStride = 1 << 7;  // so that steps fit into 32 bits

template <size_t N>
std::string text(const char (&field)[N]) {
  return {field, strnlen(field, N)};
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
          .python_ended = header.python_ended.load() != 0,
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

std::vector<std::string> read_names(const InputFile& file, const TraceHeader& header) {
  const uint64_t used = std::min({header.names_used.load(), header.names_bytes, kMaxNamesBytes});
  const auto bytes = read_values<char>(file, header.names_offset, used);
  std::vector<std::string> names;
  for (uint64_t at = 0; at + sizeof(uint32_t) <= bytes.size();) {
    uint32_t length = 0;
    std::memcpy(&length, bytes.data() + at, sizeof length);
    at += sizeof length;
    const bool is_hole = length == 0 && !names.empty();  // equal names are there once; the first is empty
    if (length > bytes.size() - at || is_hole) break;
    names.emplace_back(bytes.data() + at, length);
    at += length;
  }
  if (names.empty()) names.emplace_back();
  return names;
}

std::vector<Context> read_contexts(const InputFile& file, const TraceHeader& header) {
  const uint64_t count = std::min<uint64_t>(header.context_count.load(), header.contexts_capacity);
  auto contexts = read_values<Context>(file, header.contexts_offset, std::min(count, kMaxContexts));
  if (contexts.empty()) contexts.emplace_back();
  contexts.erase(std::find(contexts.begin() + 1, contexts.end(), Context{}), contexts.end());  // a gap, as in names
  return contexts;
}

// Killed while the list was thinned out, it does not ascend: then it is of no use.
std::vector<uint64_t> read_steps(const InputFile& file, const TraceHeader& header) {
  const uint64_t count = std::min({uint64_t{header.step_count.load()}, header.steps_capacity, kMaxSteps});
  auto steps = read_values<uint64_t>(file, header.steps_offset, count);
  if (!std::is_sorted(steps.begin(), steps.end())) steps.clear();
  return steps;
}

std::vector<Event> read_kept(const InputFile& file, const TraceHeader& header, uint64_t first_sequence) {
  const uint64_t count = std::min({header.kept_count.load(), header.kept_capacity, kMaxKept});
  auto kept = read_values<Event>(file, header.kept_offset, count);
  std::erase_if(kept, [&](const Event& event) {
    return event.sequence >= first_sequence || !is_sound(event, header.device_count);
  });
  std::sort(kept.begin(), kept.end(), [](const Event& a, const Event& b) { return a.sequence < b.sequence; });
  return kept;
}

bool has_wrapped(const TraceHeader& header) { return header.chunk_count.load() > header.chunk_capacity; }

/// Whether its process may still write over the oldest events. What was killed looks the same.
bool is_being_overwritten(const TraceHeader& header) {
  return has_wrapped(header) && header.end_state.load() == EndState::running;
}

// A program that trains overwrites the events as fast as they are read, and they are read several times. A copy is taken in a
// moment, and from then on all passes see the same; what was written since the header was read is left out of it (see
// `last_sequence`). Without memory for it the file itself is read, and what is overwritten meanwhile is counted.
std::shared_ptr<const InputFile> copy_of(std::shared_ptr<const InputFile> file, const TraceHeader& header) {
  constexpr size_t kPiece = size_t{1} << 20;
  const uint64_t end = std::min(file->bytes(), header.chunks_offset + header.chunk_capacity * header.chunk_bytes);
  std::vector<char> piece(kPiece);
  try {
    UnnamedFile copy;
    for (uint64_t at = 0; at < end; at += kPiece) {
      const size_t count = std::min<uint64_t>(kPiece, end - at);
      file->read(at, piece.data(), count);
      const bool is_hole =
          std::all_of(piece.begin(), piece.begin() + static_cast<ptrdiff_t>(count), [](char c) { return c == 0; });
      if (!is_hole || at + count == end) copy.write(at, piece.data(), count);
    }
    return std::make_shared<const InputFile>(copy.path());
  } catch (const Error&) {
    return file;
  }
}

// The slots of the chunks are counted from where the first chunk begins. A chunk begins with a header, one slot long.
std::vector<UnreadChunk> find_chunks(const InputFile& file, const TraceHeader& header) {
  std::vector<UnreadChunk> chunks;
  const uint64_t slots = header.chunk_bytes / sizeof(Event);
  const uint64_t used = std::min<uint64_t>(header.chunk_count.load(), header.chunk_capacity);
  for (uint64_t c = 0; c < used && header.chunks_offset + c * header.chunk_bytes < file.bytes(); ++c) {
    uint64_t first_sequence = 0;
    file.read(header.chunks_offset + c * header.chunk_bytes, &first_sequence, sizeof first_sequence);
    if (first_sequence != 0) chunks.push_back({first_sequence, c * slots + 1, slots - 1});
  }
  return chunks;
}

// Once chunks were taken again, everything before the last missing event is incomplete: cut it off. A few events
// at the very end may be missing because their threads were killed while they wrote.
EventLog read_events(const std::shared_ptr<const InputFile>& file, const TraceHeader& header, uint64_t last_sequence) {
  EventFile events(file, header.chunks_offset);
  EventOrder order = merge_chunks(events, find_chunks(*file, header), last_sequence, header.device_count);
  if (const uint64_t first = order.after_last_hole; has_wrapped(header)) order = drop_front(std::move(order), first);
  return {std::move(events), std::move(order.runs), order.size, std::move(order.starts)};
}

}  // namespace

uint32_t Trace::step_of(uint64_t sequence) const {
  const auto ended = std::lower_bound(step_ends.begin(), step_ends.end(), sequence) - step_ends.begin();
  return process.steps_before + (ended == 0 ? 1 : static_cast<uint32_t>(ended - 1) * step_stride + 2);
}

int64_t Trace::time_ns(const Event& event) const {
  if (event.time < start_ticks) return 0;
  return static_cast<int64_t>(static_cast<double>(event.time - start_ticks) * ns_per_tick);
}

ProcessInfo read_process(const std::filesystem::path& path) {
  const InputFile file(path);
  TraceHeader header;
  read_header(file, path, header);
  return process_of(header);
}

Trace read_trace(const std::filesystem::path& path) {
  auto file = std::make_shared<const InputFile>(path);
  TraceHeader header;
  read_header(*file, path, header);
  check_length(*file, path, header);
  uint64_t last_sequence = ~uint64_t{0};
  if (is_being_overwritten(header)) {
    last_sequence = header.last_sequence.load();
    file = copy_of(std::move(file), header);
  }
  Trace trace{.process = process_of(header),
              .devices = read_devices(header),
              .names = read_names(*file, header),
              .contexts = read_contexts(*file, header),
              .events = read_events(file, header, last_sequence),
              .initial = {},
              .dropped_events = header.dropped_events.load(),
              .dropped_blocks = header.dropped_slots.load(),
              .dropped_names = header.dropped_names.load(),
              .dropped_driver = header.dropped_driver.load(),
              .deep_calls = header.deep_calls.load(),
              .folded_names = header.folded_names.load(),
              .unnumbered_threads = header.unnumbered_threads.load(),
              .step_ends = read_steps(*file, header),
              .step_stride = std::clamp(header.step_stride.load(), 1u, kMaxStride),
              .steps_by_optimizer = header.steps_by_optimizer.load() != 0,
              .start_ticks = header.start_ticks};
  if (const uint64_t first = trace.events.empty() ? 0 : trace.events.front().sequence; first > 1) {
    trace.overwritten_events = first - 1;
    trace.kept = read_kept(*file, header, first);
    trace.initial = find_initial_blocks(file, header, first, last_sequence, trace.events);
  }
  const uint64_t ticks = header.end_ticks.load() - header.start_ticks;
  const uint64_t time_ns = header.end_time_ns.load() - header.start_time_ns;
  if (header.end_ticks.load() > header.start_ticks && time_ns > 0) {
    trace.ns_per_tick = static_cast<double>(time_ns) / static_cast<double>(ticks);
  }
  return trace;
}

}  // namespace oomdiag
