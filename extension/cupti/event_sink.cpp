#include "extension/cupti/event_sink.h"

#include <string_view>

#include "extension/cupti/collector.h"
#include "profiler/event.h"
#include "profiler/trace/ticks.h"

namespace oomdiag {

constexpr size_t kMaxPending = 1 << 16;

Event EventSink::make(EventKind kind) const noexcept {
  if (make_event_ != nullptr) return make_event_(kind);
  return {.time = read_ticks(), .kind = kind};
}

void EventSink::write(Event& event, uint16_t library, const std::string& text) {
  if (writer_ == nullptr) {
    if (pending_.size() < kMaxPending) {
      pending_.push_back({event, library, text});
    } else {
      ++lost_;
    }
    return;
  }
  event.detail = intern(library, text);
  writer_->write(event);
}

void EventSink::write_plain(Event& event) noexcept {
  if (writer_ != nullptr) writer_->write(event);
}

void EventSink::attach(TraceWriter& writer, MakeEvent make_event) {
  writer_ = &writer;
  make_event_ = make_event;
  for (Pending& pending : pending_) write(pending.event, pending.library, pending.text);
  pending_ = {};
}

// Locks and allocates for the first event of a shared object only.
uint32_t EventSink::intern(uint16_t library, const std::string& text) {
  if (!text.empty()) return writer_->intern(std::string_view(text));
  uint32_t& id = interned_[library];
  if (id == 0 && library != 0) id = writer_->intern(std::string_view(libraries_.name(library)));
  return id;
}

}  // namespace oomdiag
