#include "cli/terminal/nearest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace oomdiag {
namespace {

constexpr std::size_t kMaxNames = 3;

/// "3060ti" and "rtx3060": more than half of the shorter name is in the other, in one piece of at least four letters.
bool share_core(std::string_view left, std::string_view right) {
  const std::size_t length = std::max<std::size_t>(4, std::min(left.size(), right.size()) / 2 + 1);
  for (std::size_t begin = 0; begin + length <= left.size(); ++begin) {
    if (right.find(left.substr(begin, length)) != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

std::string plain_name(std::string_view name) {
  std::string result;
  for (const char letter : name) {
    if (letter == '-' || letter == '_' || letter == ' ') continue;
    result += static_cast<char>(letter >= 'A' && letter <= 'Z' ? letter - 'A' + 'a' : letter);
  }
  return result;
}

std::size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> before;
  std::vector<std::size_t> above(right.size() + 1);
  std::vector<std::size_t> row(right.size() + 1);
  for (std::size_t j = 0; j <= right.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= left.size(); ++i) {
    before = std::exchange(above, row);
    row[0] = i;
    for (std::size_t j = 1; j <= right.size(); ++j) {
      const bool same = left[i - 1] == right[j - 1];
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[right.size()];
}

std::vector<std::string> nearest(std::string_view requested, const std::vector<std::string>& names) {
  const std::string typed = plain_name(requested);
  std::vector<std::pair<std::size_t, std::string>> near;
  for (const std::string& name : names) {
    const std::string known = plain_name(name);
    const bool contains = typed.size() >= 2 && known.find(typed) != std::string::npos;
    const std::size_t distance = contains ? 1 : edit_distance(typed, known);
    const std::size_t most = std::max<std::size_t>(1, std::min(typed.size(), known.size()) / 3);
    if (distance <= most || share_core(typed, known)) near.emplace_back(distance, name);
  }
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& left, const auto& right) { return left.first < right.first; });
  if (near.size() > kMaxNames) near.resize(kMaxNames);
  std::vector<std::string> result;
  for (auto& [distance, name] : near) result.push_back(std::move(name));
  return result;
}

std::string did_you_mean(std::string_view requested, const std::vector<std::string>& names,
                         std::string_view otherwise) {
  const std::vector<std::string> near = nearest(requested, names);
  if (near.empty()) return std::string(otherwise);
  return fmt::format("did you mean {}? {}", fmt::join(near, " or "), otherwise);
}

}  // namespace oomdiag
