#include "extension/cupti/outlet.h"

#include <string_view>

namespace oomdiag {

constexpr size_t kMostPending = 1 << 16;

Event Outlet::make(EventKind kind) const noexcept {
  if (make_event_ != nullptr) return make_event_(kind);
  return {.time = read_ticks(), .kind = kind};
}

void Outlet::write(Event& event, uint16_t asker, const std::string& text) {
  if (writer_ == nullptr) {
    if (pending_.size() < kMostPending) {
      pending_.push_back({event, asker, text});
    } else {
      ++lost_;
    }
    return;
  }
  event.detail = intern(asker, text);
  writer_->write(event);
}

void Outlet::write_plain(Event& event) noexcept {
  if (writer_ != nullptr) writer_->write(event);
}

void Outlet::attach(TraceWriter& writer, MakeEvent make_event) {
  writer_ = &writer;
  make_event_ = make_event;
  for (Pending& pending : pending_) write(pending.event, pending.asker, pending.text);
  pending_ = {};
}

// Locks and allocates for the first event of a shared object only.
uint32_t Outlet::intern(uint16_t asker, const std::string& text) {
  if (!text.empty()) return writer_->intern(std::string_view(text));
  uint32_t& id = interned_[asker];
  if (id == 0 && asker != 0) id = writer_->intern(std::string_view(askers_.name(asker)));
  return id;
}

}  // namespace oomdiag
