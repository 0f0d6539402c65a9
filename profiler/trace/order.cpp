#include "profiler/trace/order.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <span>

#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"

// Each thread writes into a chunk of its own, so a chunk is in order and the chunks together are not. They are merged by
// what is next in each; but nothing is moved, only the order is written down, as runs:
//
//   chunk A (forward thread)     1 2 3 . . . 7 8 9            order: 1-3 from A, 4-6 from B, 7-9 from A
//   chunk B (backward thread)          4 5 6                  8 bytes per run, not 64 per event
//
// A chunk is read as far as it has the next event of all.

namespace oomdiag {
namespace {

constexpr uint64_t kMaxEvents = uint64_t{1} << 31;  // the replay remembers events by 31 bits

class Merger {
 public:
  Merger(EventFile& file, const std::vector<UnreadChunk>& chunks, uint64_t last_sequence, uint32_t devices)
      : file_(file),
        end_(std::min(last_sequence, ~uint64_t{1})),
        devices_(devices),
        waiting_(std::greater<>(), chunks) {}

  EventOrder merge() {
    while (!waiting_.empty()) {
      const UnreadChunk chunk = waiting_.top();
      waiting_.pop();
      take(chunk, waiting_.empty() ? end_ : std::min(waiting_.top().sequence - 1, end_));
    }
    find_last_hole();
    return std::move(order_);
  }

 private:
  // Takes the chunk's events up to the sequence `last`; of two chunks that claim the same sequence, that one all the same.
  void take(UnreadChunk chunk, uint64_t last) {
    const uint64_t first = chunk.sequence;
    while (chunk.slots > 0) {
      const std::shared_ptr<const EventWindow> window = file_.window(chunk.slot);
      const uint64_t place = chunk.slot % EventWindow::kEvents;
      const std::span events(window->events.data() + place, std::min(chunk.slots, EventWindow::kEvents - place));
      for (size_t i = 0; i < events.size();) {
        const uint64_t sequence = events[i].sequence;
        if (sequence < chunk.sequence || sequence > end_) return;
        if (sequence > last && sequence != first) {
          waiting_.push({sequence, chunk.slot + i, chunk.slots - i});
          return;
        }
        const size_t count = count_dense(events.subspan(i), last);
        if (count > 0) append(chunk.slot + i, count, sequence);
        i += std::max<size_t>(count, 1);
        last_read_ = std::max(last_read_, events[i - 1].sequence);
        chunk.sequence = events[i - 1].sequence + 1;
      }
      chunk.slot += events.size();
      chunk.slots -= events.size();
    }
  }

  // How many of the events, which begin with one to take, are sound and follow each other without a gap.
  size_t count_dense(std::span<const Event> events, uint64_t last) const {
    size_t count = 0;
    while (count < events.size() && events[count].sequence == events[0].sequence + count &&
           (count == 0 || events[count].sequence <= last) && is_sound(events[count], devices_)) {
      ++count;
    }
    return count;
  }

  void append(uint64_t slot, uint64_t count, uint64_t sequence) {
    if (order_.size + count >= kMaxEvents || slot + count > ~uint32_t{0}) {
      throw Error(ErrorKind::input, "the trace has too many events", "record with a smaller OOMDIAG_TRACE_MIB");
    }
    const bool starts = order_.size == 0 || sequence != next_;
    if (starts) order_.starts.push_back({static_cast<uint32_t>(order_.size), sequence});
    next_ = sequence + count;
    if (starts || slot != end_slot_) {
      order_.runs.push_back({static_cast<uint32_t>(order_.size), static_cast<uint32_t>(slot)});
    }
    end_slot_ = slot + count;
    order_.size += count;
  }

  void find_last_hole() {
    for (size_t s = 1; s < order_.starts.size(); ++s) {
      if (order_.starts[s].sequence + kTornEvents < last_read_) order_.after_last_hole = order_.starts[s].first;
    }
  }

  EventFile& file_;
  uint64_t end_;
  uint32_t devices_;
  std::priority_queue<UnreadChunk, std::vector<UnreadChunk>, std::greater<>> waiting_;
  EventOrder order_;
  uint64_t last_read_ = 0, next_ = 0, end_slot_ = 0;
};

/// `pieces` of `size` events without the first `count` events. `skip` takes events away from the front of a piece.
template <class Piece, class Skip>
std::vector<Piece> without_front(const std::vector<Piece>& pieces, uint64_t size, uint64_t count, Skip skip) {
  std::vector<Piece> left;
  for (size_t p = 0; p < pieces.size(); ++p) {
    Piece piece = pieces[p];
    const uint64_t end = p + 1 < pieces.size() ? pieces[p + 1].first : size;
    if (end <= count) continue;
    const uint64_t cut = piece.first < count ? count - piece.first : 0;
    skip(piece, cut);
    piece.first = static_cast<uint32_t>(piece.first + cut - count);
    left.push_back(piece);
  }
  return left;
}

}  // namespace

bool is_sound(const Event& event, uint32_t devices) {
  return event.sequence != 0 && event.kind != EventKind::none && event.kind <= kLastEventKind &&
         (event.device < devices || devices == 0);
}

EventOrder merge_chunks(EventFile& file, const std::vector<UnreadChunk>& chunks, uint64_t last_sequence,
                        uint32_t devices) {
  return Merger(file, chunks, last_sequence, devices).merge();
}

EventOrder drop_front(EventOrder order, uint64_t count) {
  count = std::min(count, order.size);
  const auto skip_slots = [](EventRun& run, uint64_t events) { run.slot += static_cast<uint32_t>(events); };
  const auto skip_sequences = [](SequenceStart& start, uint64_t events) { start.sequence += events; };
  return {.runs = without_front(order.runs, order.size, count, skip_slots),
          .starts = without_front(order.starts, order.size, count, skip_sequences),
          .size = order.size - count};
}

}  // namespace oomdiag
