#include "profiler/report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "profiler/replay/settings.h"

namespace oomdiag {
namespace {

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

size_t count_columns(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), begins_character));
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

}  // namespace

Unit unit_for(int64_t largest_bytes) {
  if (largest_bytes >= kGiB) return {"GiB", kGiB};
  if (largest_bytes >= kMiB) return {"MiB", kMiB};
  if (largest_bytes >= kKiB) return {"KiB", kKiB};
  return {};
}

std::string in_unit(int64_t bytes, const Unit& unit) {
  if (unit.bytes == 1) return fmt::format("{}", bytes);
  return fmt::format("{:.2f}", static_cast<double>(bytes) / static_cast<double>(unit.bytes));
}

std::string with_unit(int64_t bytes) {
  const Unit unit = unit_for(bytes);
  return fmt::format("{} {}", in_unit(bytes, unit), unit.name);
}

std::string bar(int64_t part, int64_t whole, bool unicode) {
  constexpr int64_t kColumns = 20;
  constexpr std::array<std::string_view, 8> kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  if (part <= 0 || whole <= 0) return {};
  const double share = std::min(1.0, static_cast<double>(part) / static_cast<double>(whole));
  const auto eighths = std::llround(share * kColumns * 8);
  std::string text;
  if (!unicode) {
    text.resize(static_cast<size_t>((eighths + 4) / 8), '#');
    return text;
  }
  for (int64_t i = 0; i < eighths / 8; ++i) text += "█";
  text += kEighths[static_cast<size_t>(eighths % 8)];
  return text;
}

std::string printable(std::string_view text, size_t columns) {
  std::string safe(text);
  for (char& c : safe) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  if (count_columns(safe) <= columns || columns < 8) return safe;
  const size_t head = (columns - 3) / 2;
  const size_t tail = columns - 3 - head;
  const size_t total = count_columns(safe);
  return safe.substr(0, index_of(safe, head)) + "..." + safe.substr(index_of(safe, total - tail));
}

std::string printable_end(std::string_view text, size_t columns) {
  const size_t total = count_columns(text);
  if (total <= columns || columns < 8) return printable(text, columns);
  return "..." + printable(text.substr(index_of(text, total - columns + 3)), columns);
}

std::string padded(std::string_view text, size_t columns) {
  const size_t width = count_columns(text);
  return std::string(text) + std::string(width < columns ? columns - width : 0, ' ');
}

}  // namespace oomdiag
