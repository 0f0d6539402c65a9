#include "profiler/report/text/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "profiler/report/words/printable.h"

namespace oomdiag {

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

std::string wrapped(std::string_view sentence, size_t columns) {
  constexpr size_t kMaxCharacters = 2000;
  const std::string safe = printable(sentence, kMaxCharacters);
  std::string text, line = "   ";
  for (size_t at = 0; at < safe.size();) {
    const size_t end = std::min(safe.find(' ', at), safe.size());
    const std::string word = safe.substr(at, end - at);
    if (count_columns(line) + 1 + count_columns(word) > columns && line.size() > 3) {
      text += line + "\n";
      line = "     ";
    }
    line += " " + word;
    at = end + 1;
  }
  return text + line + "\n";
}

std::string in_words(std::string name) {
  std::ranges::replace(name, '_', ' ');
  return name;
}

std::string padded(std::string_view text, size_t columns) {
  const size_t width = count_columns(text);
  return std::string(text) + std::string(width < columns ? columns - width : 0, ' ');
}

}  // namespace oomdiag
