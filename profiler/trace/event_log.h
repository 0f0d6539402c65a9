#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"

namespace oomdiag {

/// Events that follow each other both in the trace and in its file.
struct EventRun {
  uint32_t first = 0;  ///< index of the first one in the trace
  uint32_t slot = 0;   ///< … and its place in the file
};

/// A sequence that does not follow on the one before it.
struct SequenceStart {
  uint32_t first = 0;     ///< index of the event in the trace
  uint64_t sequence = 0;  ///< its sequence; those after it count on
};

/// Which events of a file were no longer there when they were read.
class LostEvents {
 public:
  void add(uint64_t index);
  uint64_t count() const { return count_; }

 private:
  std::vector<bool> lost_;  ///< by index, as each pass over the events finds them again
  uint64_t count_ = 0;
};

/// The events of a trace by ascending sequence: in memory, or left in their file and read as they are asked for. What is
/// read is copied out of the file and never mapped, so neither a file that shrinks nor one that is still being written
/// does harm, and resident are a few windows only. An event that was overwritten since the file was put in order reads as
/// one of kind none. Copies are cheap. One thread at a time.
class EventLog {
 public:
  /// Walks the events in order. An event is there until the iterator moves on.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Event;
    using difference_type = std::ptrdiff_t;
    using pointer = const Event*;
    using reference = const Event&;

    Iterator() = default;
    const Event& operator*() const { return *at_; }
    const Event* operator->() const { return at_; }
    Iterator& operator++() {
      ++index_;
      if (++at_ == end_) [[unlikely]]
        seek();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(const Iterator& other) const { return index_ == other.index_; }
    /// Which event of the trace this is.
    uint64_t index() const { return index_; }

   private:
    friend class EventLog;
    explicit Iterator(uint64_t end) : index_(end) {}
    Iterator(const EventLog& log, uint64_t index) : log_(&log), index_(index), run_(log.run_of(index)) { seek(); }
    void seek();

    const EventLog* log_ = nullptr;
    uint64_t index_ = 0;
    const Event* at_ = nullptr;
    const Event* end_ = nullptr;  ///< how far the window and the run go
    size_t run_ = 0;
    std::shared_ptr<const EventWindow> window_{};
  };

  EventLog() = default;
  EventLog(std::vector<Event> events) : memory_(std::move(events)) {}
  EventLog(std::initializer_list<Event> events) : memory_(events) {}
  /// `size` events in `file`, in `runs`, which are in order. Each of `starts` is the first of a run: by them every
  /// event's sequence is checked as it is read. Without any the events are taken as they are.
  EventLog(EventFile file, std::vector<EventRun> runs, uint64_t size, std::vector<SequenceStart> starts = {});

  uint64_t size() const { return runs_.empty() ? memory_.size() : size_; }
  bool empty() const { return size() == 0; }
  /// How many of the events that were read were overwritten since the file was put in order, or cut off.
  uint64_t lost() const { return lost_ == nullptr ? 0 : lost_->count(); }
  /// A copy of one event; a few dozen nanoseconds where it lies in a file: iterate where there are many.
  Event operator[](uint64_t index) const { return *from(index); }
  Event front() const { return (*this)[0]; }
  Event back() const { return (*this)[size() - 1]; }

  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return Iterator(size()); }
  /// Begins at the event with this index, or at the end.
  Iterator from(uint64_t index) const { return {*this, index}; }
  /// Copies of the events from `begin` to before `end`, at most `at_most` of them.
  std::vector<Event> slice(uint64_t begin, uint64_t end, uint64_t at_most) const;

  /// The first `count` events.
  EventLog first(uint64_t count) const;

  /// Appends to events in memory.
  void push_back(const Event& event) { memory_.push_back(event); }
  /// The events of a log that is not in a file, to change them.
  std::vector<Event>& in_memory() { return memory_; }

 private:
  size_t run_of(uint64_t index) const;
  uint64_t sequence_of(uint64_t index) const;
  std::shared_ptr<const EventWindow> read(uint64_t index, uint64_t slot, uint64_t count) const;

  std::vector<Event> memory_;
  std::vector<EventRun> runs_;
  std::vector<SequenceStart> starts_;
  std::shared_ptr<LostEvents> lost_;  ///< null where the events are in memory; copies share it
  uint64_t size_ = 0;
  mutable EventFile file_;
};

}  // namespace oomdiag
