#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"

namespace oomdiag {

/// Events kept in memory at about 8 bytes each, where those of a trace file would take 64. Made by EventPacker.
class PackedEvents {
 public:
  /// Fills the window with this number. Slot i holds the event with sequence i + 1.
  void read(EventWindow& window) const;
  uint64_t size() const { return size_; }
  /// What they take.
  uint64_t bytes() const { return bytes_; }

 private:
  friend class EventPacker;
  std::vector<std::unique_ptr<uint8_t[]>> windows_;
  uint64_t size_ = 0, bytes_ = 0;
};

/// Packs events, which are numbered by their order: `sequence` is not kept.
class EventPacker {
 public:
  EventPacker();
  void add(const Event& event);
  uint64_t size() const { return packed_->size_; }
  /// What was added; nothing can be added any more.
  std::shared_ptr<const PackedEvents> finish();

 private:
  void seal();

  std::shared_ptr<PackedEvents> packed_;
  std::vector<uint8_t> open_;  ///< the window that is being filled
  size_t used_ = 0;            ///< … so many bytes of it
  Event before_;
};

/// All events of `packed` in their order.
EventLog log_of(std::shared_ptr<const PackedEvents> packed);

}  // namespace oomdiag
