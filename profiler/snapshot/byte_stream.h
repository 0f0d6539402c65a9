#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "profiler/trace/event_file.h"

namespace oomdiag {

/// A file read from front to back. `watch` is called now and then, before more of it is read.
class ByteStream {
 public:
  ByteStream(const InputFile& file, std::function<void()> watch)
      : file_(file), watch_(std::move(watch)), buffer_(kBuffer + kSpare) {}

  /// The next `count` bytes, in one piece; null where the file ends before. Eight bytes may be read wherever they begin.
  const uint8_t* take(uint64_t count) {
    if (count > end_ - at_) [[unlikely]] {
      if (!refill(count)) return nullptr;
    }
    const uint8_t* bytes = buffer_.data() + at_;
    at_ += count;
    return bytes;
  }
  uint64_t position() const { return offset_ - (end_ - at_); }

 private:
  static constexpr size_t kBuffer = 1 << 18;
  static constexpr size_t kSpare = 8;

  [[gnu::noinline]] bool refill(uint64_t count) {
    watch_();
    const uint64_t kept = end_ - at_;
    const uint64_t left = file_.bytes() - offset_;
    if (count > kept + left) return false;
    std::memmove(buffer_.data(), buffer_.data() + at_, kept);
    if (count + kSpare > buffer_.size()) buffer_.resize(count + kSpare);
    const uint64_t fresh = std::min(left, buffer_.size() - kSpare - kept);
    file_.read(offset_, buffer_.data() + kept, fresh);
    offset_ += fresh;
    at_ = 0;
    end_ = kept + fresh;
    return true;
  }

  const InputFile& file_;
  std::function<void()> watch_;
  std::vector<uint8_t> buffer_;
  uint64_t at_ = 0, end_ = 0;  ///< in the buffer
  uint64_t offset_ = 0;        ///< in the file, of what comes after the buffer
};

}  // namespace oomdiag
