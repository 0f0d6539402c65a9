#include "profiler/trace/event_log.h"

#include <algorithm>

namespace oomdiag {

EventLog::EventLog(EventFile file, std::vector<EventRun> runs, uint64_t size)
    : runs_(std::move(runs)), size_(size), file_(std::move(file)) {}

size_t EventLog::run_of(uint64_t index) const {
  if (runs_.empty()) return 0;
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), index,
                                      [](uint64_t i, const EventRun& run) { return i < run.first; });
  return static_cast<size_t>(after - runs_.begin()) - 1;
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
  window_ = log_->file_.window(slot);
  at_ = window_->events.data() + place;
  end_ = at_ + std::min(left_in_run, EventWindow::kEvents - place);
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
