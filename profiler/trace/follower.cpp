#include "profiler/trace/follower.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/read_header.h"

namespace oomdiag {
namespace {

bool is_of_first_gpu(const Event& event) { return event.device == 0; }

}  // namespace

int64_t LiveFigures::free_bytes() const {
  return std::max<int64_t>(0, total_bytes - reserved_bytes - non_pytorch_bytes);
}

std::unique_ptr<TraceFollower> TraceFollower::open(const std::filesystem::path& file) try {
  return std::unique_ptr<TraceFollower>(new TraceFollower(file));
} catch (const Error&) {
  return nullptr;
}

TraceFollower::TraceFollower(const std::filesystem::path& file) : file_(file) {
  read_header(file_, file, header_);
  if (header_.device_count == 0) throw Error(ErrorKind::input, file.string() + " is the trace of no device");
  figures_.total_bytes = header_.devices[0].total_bytes;
  figures_.non_pytorch_bytes = header_.devices[0].context_bytes;
  figures_.step = header_.steps_before;
}

template <class T>
T TraceFollower::read_value(uint64_t offset) const {
  T value{};
  file_.read(offset, &value, sizeof value);
  return value;
}

const LiveFigures& TraceFollower::read_on() {
  const auto taken = read_value<uint32_t>(offsetof(TraceHeader, chunk_count));
  places_.resize(std::max(places_.size(), std::min<size_t>(taken, header_.chunk_capacity)));
  std::vector<Event> events;
  for (uint64_t chunk = 0; chunk < places_.size(); ++chunk) read_chunk(chunk, events);
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.sequence < b.sequence; });
  for (const Event& event : events) take(event);
  return figures_;
}

void TraceFollower::read_chunk(uint64_t chunk, std::vector<Event>& events) {
  const uint64_t begin = header_.chunks_offset + chunk * header_.chunk_bytes;
  const uint64_t capacity = (header_.chunk_bytes - sizeof(ChunkHeader)) / sizeof(Event);
  const auto first = read_value<uint64_t>(begin + offsetof(ChunkHeader, first_sequence));
  Place& place = places_[chunk];
  if (place.first_sequence != first) place = {.first_sequence = first, .next = 0, .last_sequence = first - 1};
  std::array<Event, 64> piece;
  while (first != 0 && place.next < capacity) {
    const uint64_t count = std::min<uint64_t>(piece.size(), capacity - place.next);
    file_.read(begin + sizeof(ChunkHeader) + place.next * sizeof(Event), piece.data(), count * sizeof(Event));
    for (uint64_t i = 0; i < count; ++i, ++place.next) {
      // The sequence is stored last: what is newer than the one before it is whole.
      if (piece[i].sequence <= place.last_sequence) return;
      place.last_sequence = piece[i].sequence;
      events.push_back(piece[i]);
    }
  }
}

void TraceFollower::take(const Event& event) {
  if (event.kind == EventKind::scope_end && is_optimizer_step(event.detail)) end_step();
  if (!is_of_first_gpu(event)) return;
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
      ++figures_.ooms;
      break;
    case EventKind::device_memory:
      figures_.non_pytorch_bytes =
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

void TraceFollower::end_step() {
  ++figures_.step;
  auto& peaks = figures_.step_peaks;
  if (peaks.size() == LiveFigures::kMaxStepPeaks) peaks.erase(peaks.begin());
  peaks.push_back(step_peak_);
  step_peak_ = figures_.allocated_bytes;
}

bool TraceFollower::is_optimizer_step(uint64_t name) {
  if (name >= optimizer_names_.size()) read_names();
  return name < optimizer_names_.size() && optimizer_names_[name];
}

// Names lie behind each other, and more are put behind them: each is read once.
void TraceFollower::read_names() {
  const auto written = read_value<uint64_t>(offsetof(TraceHeader, names_used));
  const uint64_t used = std::min({written, header_.names_bytes, names_read_ + kMaxNamesBytes});
  if (used <= names_read_) return;
  std::vector<char> bytes(used - names_read_);
  file_.read(header_.names_offset + names_read_, bytes.data(), bytes.size());
  uint64_t at = 0;
  for (uint32_t length = 0; at + sizeof length <= bytes.size(); at += sizeof length + length) {
    std::memcpy(&length, bytes.data() + at, sizeof length);
    if (length > bytes.size() - at - sizeof length) break;
    const std::string_view name(bytes.data() + at + sizeof length, length);
    optimizer_names_.push_back(name.starts_with("Optimizer.step"));
  }
  names_read_ += at;
}

}  // namespace oomdiag
