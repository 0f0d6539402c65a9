#include "profiler/trace/event_log.h"

#include <algorithm>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"

namespace oomdiag {

void LostEvents::add(uint64_t index) {
  if (index >= lost_.size()) lost_.resize(index + 1);
  count_ += lost_[index] ? 0 : 1;
  lost_[index] = true;
}

EventLog::EventLog(EventFile file, std::vector<EventRun> runs, uint64_t size, std::vector<SequenceStart> starts)
    : runs_(std::move(runs)),
      starts_(std::move(starts)),
      lost_(std::make_shared<LostEvents>()),
      size_(size),
      file_(std::move(file)) {}

size_t EventLog::run_of(uint64_t index) const {
  if (runs_.empty()) return 0;
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), index,
                                      [](uint64_t i, const EventRun& run) { return i < run.first; });
  return static_cast<size_t>(after - runs_.begin()) - 1;
}

uint64_t EventLog::sequence_of(uint64_t index) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), index,
                                      [](uint64_t i, const SequenceStart& start) { return i < start.first; });
  const SequenceStart& start = *std::prev(after);
  return start.sequence + (index - start.first);
}

// The events [index, index + count) lie in one window, from this slot on, and their sequences follow each other.
std::shared_ptr<const EventWindow> EventLog::read(uint64_t index, uint64_t slot, uint64_t count) const {
  std::shared_ptr<const EventWindow> window = file_.window(slot);
  if (starts_.empty()) return window;
  const uint64_t sequence = sequence_of(index);
  const Event* const events = window->events.data() + slot % EventWindow::kEvents;
  for (uint64_t i = 0; i < count; ++i) {
    if (events[i].sequence == sequence + i) [[likely]]
      continue;
    file_.hide(slot + i, sequence + i);
    lost_->add(index + i);
  }
  return window;
}

void EventLog::Iterator::seek() {
  if (index_ >= log_->size()) {
    index_ = log_->size();
    return;
  }
  if (log_->runs_.empty()) {
    at_ = log_->memory_.data() + index_;
    end_ = log_->memory_.data() + log_->memory_.size();
    return;
  }
  const auto& runs = log_->runs_;
  if (run_ + 1 < runs.size() && runs[run_ + 1].first == index_) ++run_;
  const uint64_t left_in_run = (run_ + 1 < runs.size() ? runs[run_ + 1].first : log_->size_) - index_;
  const uint64_t slot = runs[run_].slot + (index_ - runs[run_].first);
  const uint64_t place = slot % EventWindow::kEvents;
  const uint64_t count = std::min(left_in_run, EventWindow::kEvents - place);
  window_ = log_->read(index_, slot, count);
  at_ = window_->events.data() + place;
  end_ = at_ + count;
}

EventLog EventLog::first(uint64_t count) const {
  EventLog log = *this;
  if (count >= size()) return log;
  log.memory_.resize(std::min<size_t>(count, log.memory_.size()));
  while (!log.runs_.empty() && log.runs_.back().first >= count) log.runs_.pop_back();
  log.size_ = count;
  return log;
}

std::vector<Event> EventLog::slice(uint64_t begin, uint64_t end, uint64_t at_most) const {
  std::vector<Event> events;
  end = std::min({end, begin + at_most, size()});
  for (Iterator at = from(begin); at.index() < end; ++at) events.push_back(*at);
  return events;
}

}  // namespace oomdiag
