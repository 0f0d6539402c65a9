#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace oomdiag {

/// Pickles plain data, protocol 3. Texts and what is kept by `remember` are written once.
class Pickler {
 public:
  Pickler() : bytes_("\x80\x03") {}

  void none() { bytes_ += 'N'; }
  void boolean(bool value) { bytes_ += value ? '\x88' : '\x89'; }
  void integer(int64_t value) {
    if (value >= 0 && value < 256) {
      bytes_ += 'K';
      return raw(static_cast<uint64_t>(value), 1);
    }
    bytes_ += "\x8a\x08";
    raw(static_cast<uint64_t>(value), 8);
  }
  void text(std::string_view value) {
    const auto [known, fresh] = texts_.try_emplace(std::string(value), next_);
    if (!fresh) return recall(known->second);
    const std::string safe = as_utf8(value);
    bytes_ += 'X';
    raw(safe.size(), 4);
    bytes_ += safe;
    remember();
  }
  /// The value on top gets this number.
  uint32_t remember() {
    bytes_ += 'r';
    raw(next_, 4);
    return next_++;
  }
  void recall(uint32_t number) {
    bytes_ += 'j';
    raw(number, 4);
  }
  // Keys and values, or elements, stand between begin and end.
  void begin_dict() { bytes_ += "}("; }
  void end_dict() { bytes_ += 'u'; }
  void begin_list() { bytes_ += "]("; }
  void end_list() { bytes_ += 'e'; }
  void item(std::string_view key, int64_t value) {
    text(key);
    integer(value);
  }
  void item(std::string_view key, std::string_view value) {
    text(key);
    text(value);
  }
  std::string finish() { return std::move(bytes_) + "."; }

 private:
  void raw(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
  }
  // Names come from programs: what is no ASCII may be no UTF-8 either, which no unpickler takes.
  static std::string as_utf8(std::string_view text) {
    std::string safe(text);
    std::ranges::replace_if(
        safe, [](char c) { return static_cast<unsigned char>(c) >= 0x80; }, '?');
    return safe;
  }

  std::string bytes_;
  std::unordered_map<std::string, uint32_t> texts_;
  uint32_t next_ = 0;
};

}  // namespace oomdiag
