#include "profiler/trace/event_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "profiler/error.h"
#include "profiler/trace/packed_events.h"  // IWYU pragma: keep (called through a pointer, which the check does not see)

namespace oomdiag {

InputFile::InputFile(const std::filesystem::path& path) : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  struct stat info {};
  if (file_ < 0 || fstat(file_, &info) != 0 || !S_ISREG(info.st_mode)) {
    const std::string reason = file_ < 0 ? std::strerror(errno) : "not a regular file";
    if (file_ >= 0) close(file_);
    throw Error(ErrorKind::input, "cannot read " + path.string() + ": " + reason);
  }
  bytes_ = static_cast<uint64_t>(info.st_size);
  posix_fadvise(file_, 0, 0, POSIX_FADV_SEQUENTIAL);
}

InputFile::~InputFile() { close(file_); }

void InputFile::read(uint64_t offset, void* to, size_t bytes) const {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = pread(file_, at, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    at += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  if (bytes > 0) std::memset(at, 0, bytes);  // of nothing the address may be null
}

// The window not used for longest, unless an iterator still stands on it.
std::shared_ptr<EventWindow> EventFile::unused_window() {
  if (windows_.size() < kMaxWindows) return std::make_shared<EventWindow>();
  std::shared_ptr<EventWindow> oldest = std::move(windows_.back());
  windows_.pop_back();
  return oldest.use_count() == 1 ? std::move(oldest) : std::make_shared<EventWindow>();
}

void EventFile::read(EventWindow& window) const {
  if (packed_) return packed_->read(window);
  file_->read(offset_ + window.number * sizeof window.events, window.events.data(), sizeof window.events);
}

void EventFile::hide(uint64_t slot, uint64_t sequence) {
  for (const auto& window : windows_) {
    if (window->number != slot / EventWindow::kEvents) continue;
    window->events[slot % EventWindow::kEvents] = {.sequence = sequence};
    return;
  }
}

std::shared_ptr<const EventWindow> EventFile::window(uint64_t slot) {
  const uint64_t number = slot / EventWindow::kEvents;
  const auto is_it = [&](const auto& window) { return window->number == number; };
  auto found = std::find_if(windows_.begin(), windows_.end(), is_it);
  if (found == windows_.end()) {
    std::shared_ptr<EventWindow> fresh = unused_window();
    fresh->number = number;
    read(*fresh);
    found = windows_.insert(windows_.end(), std::move(fresh));
  }
  std::rotate(windows_.begin(), found, found + 1);
  return windows_.front();
}

}  // namespace oomdiag
