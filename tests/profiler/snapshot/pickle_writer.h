#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace oomdiag {

/// Writes pickles for tests, by hand and opcode by opcode.
class PickleWriter {
 public:
  explicit PickleWriter(int protocol = 4) { add("\x80").byte(protocol); }

  PickleWriter& add(const std::string& opcodes) { return bytes_ += opcodes, *this; }
  PickleWriter& byte(int value) { return bytes_ += static_cast<char>(value), *this; }
  PickleWriter& text(const std::string& text) { return add("X").number(text.size(), 4).add(text); }
  PickleWriter& integer(int64_t value) {
    if (value >= 0 && value < 256) return add("K").byte(static_cast<int>(value));
    return add("\x8a\x08").number(static_cast<uint64_t>(value), 8);
  }
  PickleWriter& dict(const std::vector<std::pair<std::string, std::string>>& items) {
    add("}(");
    for (const auto& [key, value] : items) text(key).add(value);
    return add("u");
  }
  PickleWriter& list(const std::vector<std::string>& elements) {
    add("](");
    for (const std::string& element : elements) add(element);
    return add("e");
  }
  std::string stop() { return bytes_ + "."; }
  /// Without the first two bytes: a part of another pickle.
  std::string part() const { return bytes_.substr(2); }

 private:
  PickleWriter& number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) byte(static_cast<int>(value >> (8 * i) & 0xff));
    return *this;
  }

  std::string bytes_;
};

inline std::string integer(int64_t value) { return PickleWriter().integer(value).part(); }
inline std::string text(const std::string& value) { return PickleWriter().text(value).part(); }
inline std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  return PickleWriter().dict(items).part();
}
inline std::string list(const std::vector<std::string>& elements) { return PickleWriter().list(elements).part(); }

}  // namespace oomdiag
