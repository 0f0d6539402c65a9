#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "profiler/event.h"

namespace oomdiag {

/// A file open for reading. What lies behind its end reads as zeros, also when it shrinks meanwhile. Any thread.
class InputFile {
 public:
  /// Throws Error(input) if it cannot be opened or is not a regular file.
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  uint64_t bytes() const { return bytes_; }  ///< when it was opened
  void read(uint64_t offset, void* to, size_t bytes) const;

 private:
  int file_ = -1;
  uint64_t bytes_ = 0;
};

/// A piece of a file of events.
struct EventWindow {
  static constexpr uint64_t kEvents = 1024;

  uint64_t number = 0;  ///< it begins at slot number ∙ kEvents
  std::array<Event, kEvents> events;
};

class PackedEvents;

/// Slots of 64 bytes from some offset of a file on, or packed ones, read window by window. Keeps the windows used last, so
/// that threads whose events alternate do not read the same ones again and again. Copies share the file. One thread at a
/// time.
class EventFile {
 public:
  EventFile() = default;
  EventFile(std::shared_ptr<const InputFile> file, uint64_t offset) : file_(std::move(file)), offset_(offset) {}
  explicit EventFile(std::shared_ptr<const PackedEvents> packed) : packed_(std::move(packed)) {}

  /// The window that holds this slot.
  std::shared_ptr<const EventWindow> window(uint64_t slot);
  /// A copy of the event in this slot.
  Event event(uint64_t slot) { return window(slot)->events[slot % EventWindow::kEvents]; }
  /// Puts an event of kind none with this sequence in place of what was read of the slot, as long as its window is kept.
  void hide(uint64_t slot, uint64_t sequence);

 private:
  static constexpr size_t kMaxWindows = 48;  // 3 MiB
  std::shared_ptr<EventWindow> unused_window();

  void read(EventWindow& window) const;

  std::shared_ptr<const InputFile> file_;
  std::shared_ptr<const PackedEvents> packed_;  ///< in place of the file
  uint64_t offset_ = 0;
  std::vector<std::shared_ptr<EventWindow>> windows_;  ///< the one used last first
};

}  // namespace oomdiag
