#include "profiler/trace/tail.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace oomdiag {
namespace {

bool is_of_first_card(const Event& event) { return event.device == 0; }

}  // namespace

int64_t LiveFigures::free_bytes() const { return std::max<int64_t>(0, total_bytes - reserved_bytes - outside_bytes); }

std::unique_ptr<TraceTail> TraceTail::open(const std::filesystem::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info {};
  const bool is_file = descriptor >= 0 && fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode);
  const auto bytes = is_file ? static_cast<uint64_t>(info.st_size) : 0;
  void* map = bytes < kHeaderBytes ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (descriptor >= 0) close(descriptor);
  if (map == MAP_FAILED) return nullptr;
  auto tail = std::unique_ptr<TraceTail>(new TraceTail(static_cast<const char*>(map), bytes));
  const TraceHeader& header = tail->header();
  const bool is_trace = std::memcmp(header.magic, kTraceMagic, sizeof kTraceMagic) == 0 &&
                        header.version == kTraceVersion && header.file_bytes <= bytes && header.device_count > 0;
  return is_trace ? std::move(tail) : nullptr;
}

TraceTail::TraceTail(const char* map, uint64_t bytes) : map_(map), bytes_(bytes) {
  figures_.total_bytes = header().devices[0].total_bytes;
  figures_.outside_bytes = header().devices[0].context_bytes;
  figures_.step = header().steps_before;
}

TraceTail::~TraceTail() { munmap(const_cast<char*>(map_), bytes_); }

const LiveFigures& TraceTail::read_on() {
  const uint64_t used = std::min<uint64_t>(header().chunk_count.load(), header().chunk_capacity);
  places_.resize(used);
  std::vector<Event> events;
  for (uint64_t chunk = 0; chunk < used; ++chunk) read_chunk(chunk, events);
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.sequence < b.sequence; });
  for (const Event& event : events) take(event);
  return figures_;
}

void TraceTail::read_chunk(uint64_t chunk, std::vector<Event>& events) {
  const char* at = map_ + header().chunks_offset + chunk * header().chunk_bytes;
  const auto& chunk_header = *reinterpret_cast<const ChunkHeader*>(at);
  const uint64_t first = chunk_header.first_sequence.load(std::memory_order_acquire);
  Place& place = places_[chunk];
  if (place.first_sequence != first) place = {.first_sequence = first, .next = 0, .last_sequence = first - 1};
  const uint64_t room = (header().chunk_bytes - sizeof(ChunkHeader)) / sizeof(Event);
  auto* slots = reinterpret_cast<const Event*>(at + sizeof(ChunkHeader));
  for (; first != 0 && place.next < room; ++place.next) {
    const Event& slot = slots[place.next];
    // The sequence is stored last: what is newer than the one before it is whole.
    const uint64_t sequence = std::atomic_ref(const_cast<uint64_t&>(slot.sequence)).load(std::memory_order_acquire);
    if (sequence <= place.last_sequence) return;
    place.last_sequence = sequence;
    events.push_back(slot);
  }
}

void TraceTail::take(const Event& event) {
  if (event.kind == EventKind::scope_end && is_optimizer_step(event.detail)) end_step();
  if (!is_of_first_card(event)) return;
  const bool is_beginning = (event.flags & kBeforeRecording) != 0;
  switch (event.kind) {
    case EventKind::alloc:
      if (figures_.step == 0) figures_.step = 1;
      figures_.allocated_bytes += event.bytes;
      break;
    case EventKind::free_requested:
      figures_.allocated_bytes -= event.bytes;
      break;
    case EventKind::segment_alloc:
    case EventKind::segment_map:
      figures_.reserved_bytes += event.bytes;
      break;
    case EventKind::segment_free:
    case EventKind::segment_unmap:
      figures_.reserved_bytes -= event.bytes;
      break;
    case EventKind::out_of_memory:
      ++figures_.refusals;
      break;
    case EventKind::device_memory:
      figures_.outside_bytes =
          std::max<int64_t>(0, event.bytes - static_cast<int64_t>(event.address) - figures_.reserved_bytes);
      break;
    case EventKind::segment_state:
      if (is_beginning) figures_.reserved_bytes += event.bytes;
      break;
    case EventKind::block_state:
      if (is_beginning && (event.flags & kBlockAllocated) != 0) {
        figures_.allocated_bytes += static_cast<int64_t>(event.detail);
      }
      break;
    default:  // the rest says nothing about bytes
      break;
  }
  figures_.peak_allocated_bytes = std::max(figures_.peak_allocated_bytes, figures_.allocated_bytes);
  step_peak_ = std::max(step_peak_, figures_.allocated_bytes);
}

void TraceTail::end_step() {
  ++figures_.step;
  auto& peaks = figures_.step_peaks;
  if (peaks.size() == LiveFigures::kMostStepPeaks) peaks.erase(peaks.begin());
  peaks.push_back(step_peak_);
  step_peak_ = figures_.allocated_bytes;
}

// Names lie behind each other, and more are put behind them: each is read once.
bool TraceTail::is_optimizer_step(uint64_t name) {
  const char* begin = map_ + header().names_offset;
  const uint64_t used = std::min(header().names_used.load(std::memory_order_acquire), header().names_bytes);
  while (name >= optimizer_names_.size() && names_read_ + sizeof(uint32_t) <= used) {
    uint32_t length = 0;
    std::memcpy(&length, begin + names_read_, sizeof length);
    const uint64_t end = names_read_ + sizeof length + length;
    if (end > used) break;
    optimizer_names_.push_back(std::string_view(begin + end - length, length).starts_with("Optimizer.step"));
    names_read_ = end;
  }
  return name < optimizer_names_.size() && optimizer_names_[name];
}

}  // namespace oomdiag
