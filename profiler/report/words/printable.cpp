#include "profiler/report/words/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace oomdiag {
namespace {

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

/// A character of UTF-8.
struct Character {
  uint32_t code = 0;
  size_t bytes = 0;  ///< 0: none begins here
};

Character read_character(std::string_view text) {
  const auto first = static_cast<unsigned char>(text.front());
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xF8 ? 0 : first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC2 ? 2 : 0;
  if (bytes == 0 || bytes > text.size()) return {};
  uint32_t code = first & (0x7Fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if (begins_character(text[i])) return {};
    code = code << 6 | (static_cast<unsigned char>(text[i]) & 0x3Fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code < 0xE000;
  return code < kLeast[bytes] || code > 0x10FFFF || is_surrogate ? Character{} : Character{code, bytes};
}

bool is_obeyed(uint32_t code) {
  const auto in = [&](uint32_t from, uint32_t to) { return code >= from && code <= to; };
  return code < 0x20 || in(0x7F, 0x9F) || code == 0x061C || in(0x200E, 0x200F) || in(0x2028, 0x202E) ||
         in(0x2066, 0x2069) || code == 0xFEFF;
}

/// The index behind the first `columns` characters.
size_t index_of(std::string_view text, size_t columns) {
  size_t i = 0;
  for (; i < text.size(); ++i) {
    if (!begins_character(text[i])) continue;
    if (columns == 0) break;
    --columns;
  }
  return i;
}

/// What stands for the few characters beyond ASCII that our own texts use.
std::string_view in_ascii(uint32_t code) {
  constexpr std::pair<uint32_t, std::string_view> kSpellings[] = {
      {0x2190, "<-"}, {0x2192, "->"}, {0x00D7, "x"}, {0x2264, "<="}, {0x2265, ">="}, {0x2219, "*"}, {0x2026, "..."}};
  for (const auto& [known, spelling] : kSpellings) {
    if (known == code) return spelling;
  }
  return "?";
}

std::string replace_controls(std::string_view text, bool keeps_lines, bool unicode) {
  std::string safe;
  safe.reserve(text.size());
  while (!text.empty()) {
    const Character next = read_character(text);
    if (next.bytes > 0 && (!is_obeyed(next.code) || (keeps_lines && next.code == '\n'))) {
      safe.append(unicode || next.bytes == 1 ? text.substr(0, next.bytes) : in_ascii(next.code));
    } else {
      safe.append(keeps_lines && next.code == '\t' ? " " : "?");
    }
    text.remove_prefix(std::max<size_t>(next.bytes, 1));
  }
  return safe;
}

}  // namespace

size_t count_columns(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), begins_character));
}

std::string printable(std::string_view text, size_t columns) {
  std::string safe = replace_controls(text, false, true);
  const size_t total = count_columns(safe);
  if (total <= columns || columns < 8) return safe;
  const size_t head = (columns - 3) / 2;
  const size_t tail = columns - 3 - head;
  return safe.substr(0, index_of(safe, head)) + "..." + safe.substr(index_of(safe, total - tail));
}

std::string printable_end(std::string_view text, size_t columns) {
  std::string safe = replace_controls(text, false, true);
  const size_t total = count_columns(safe);
  if (total <= columns || columns < 8) return safe;
  return "..." + safe.substr(index_of(safe, total - columns + 3));
}

std::string escape_controls(std::string json) {
  std::string safe;
  size_t copied = 0;
  for (size_t at = 0; at < json.size();) {
    const Character next = read_character(std::string_view(json).substr(at));
    if (next.code > '~' && is_obeyed(next.code)) {
      safe.append(json, copied, at - copied).append(fmt::format("\\u{:04x}", next.code));
      copied = at + next.bytes;
    }
    at += std::max<size_t>(next.bytes, 1);
  }
  if (copied == 0) return json;
  return safe.append(json, copied);
}

std::string printable_lines(std::string_view text, bool unicode) { return replace_controls(text, true, unicode); }

}  // namespace oomdiag
