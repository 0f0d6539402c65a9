#include "profiler/trace/order.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "profiler/error.h"

// Each thread writes into a chunk of its own, so a chunk is in order and the chunks together are not. They are merged by
// what is next in each; but nothing is moved, only the order is written down, as runs:
//
//   chunk A (forward thread)     1 2 3 . . . 7 8 9            order: 1-3 from A, 4-6 from B, 7-9 from A
//   chunk B (backward thread)          4 5 6                  8 bytes per run, not 64 per event
//
// Where no sequence is missing in a chunk the run's end follows from arithmetic, and nothing is read.

namespace oomdiag {
namespace {

constexpr uint64_t kMaxEvents = uint64_t{1} << 31;  // the replay remembers events by 31 bits

class Merger {
 public:
  Merger(EventFile& file, std::vector<ChunkExtent> chunks, uint32_t devices)
      : file_(file), chunks_(std::move(chunks)), devices_(devices) {
    for (size_t c = 0; c < chunks_.size(); ++c) {
      if (chunks_[c].count == 0) continue;
      waiting_.push({chunks_[c].first_sequence, c});
      last_ = std::max(last_, chunks_[c].last_sequence);
    }
  }

  EventOrder merge() {
    while (!waiting_.empty()) {
      ChunkExtent& chunk = chunks_[waiting_.top().second];
      const size_t number = waiting_.top().second;
      waiting_.pop();
      const uint64_t limit = waiting_.empty() ? ~uint64_t{0} : waiting_.top().first;
      chunk.dense ? take_dense(chunk, limit) : take_each(chunk, limit);
      if (chunk.count > 0) waiting_.push({chunk.first_sequence, number});
    }
    return std::move(order_);
  }

 private:
  void take_dense(ChunkExtent& chunk, uint64_t limit) {
    const uint64_t limit_here = limit > chunk.first_sequence ? limit - chunk.first_sequence : 1;
    const uint64_t count = std::min(chunk.count, limit_here);
    append(chunk.slot, count, chunk.first_sequence);
    chunk.slot += count;
    chunk.count -= count;
    chunk.first_sequence += count;
  }

  // At least one event, else two chunks that claim the same sequence would wait for each other for ever.
  void take_each(ChunkExtent& chunk, uint64_t limit) {
    bool first = true;
    while (chunk.count > 0) {
      const std::shared_ptr<const EventWindow> window = file_.window(chunk.slot);
      uint64_t place = chunk.slot % EventWindow::kEvents;
      for (; place < EventWindow::kEvents && chunk.count > 0; ++place) {
        const Event& event = window->events[place];
        chunk.first_sequence = event.sequence;
        if (!first && event.sequence >= limit) return;
        if (is_sound(event, devices_)) append(chunk.slot, 1, event.sequence);
        first = false;
        ++chunk.slot;
        --chunk.count;
      }
    }
  }

  void append(uint64_t slot, uint64_t count, uint64_t sequence) {
    if (order_.size + count >= kMaxEvents || slot + count > ~uint32_t{0}) {
      throw Error(ErrorKind::input, "the trace has too many events", "record with a smaller OOMDIAG_TRACE_MIB");
    }
    const bool starts = order_.size == 0 || sequence != next_;
    if (order_.size > 0 && starts && sequence + kTornEvents < last_) order_.after_last_hole = order_.size;
    if (starts) order_.starts.push_back({static_cast<uint32_t>(order_.size), sequence});
    next_ = sequence + count;
    if (starts || slot != end_slot_) {
      order_.runs.push_back({static_cast<uint32_t>(order_.size), static_cast<uint32_t>(slot)});
    }
    end_slot_ = slot + count;
    order_.size += count;
  }

  using Next = std::pair<uint64_t, size_t>;  // sequence, chunk

  EventFile& file_;
  std::vector<ChunkExtent> chunks_;
  uint32_t devices_;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> waiting_;
  EventOrder order_;
  uint64_t last_ = 0, next_ = 0, end_slot_ = 0;
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

EventOrder merge_chunks(EventFile& file, std::vector<ChunkExtent> chunks, uint32_t devices) {
  return Merger(file, std::move(chunks), devices).merge();
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
