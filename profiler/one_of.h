#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

namespace oomdiag {

/// Whether `name` is in the list.
template <size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& list) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

inline bool is_one_of(std::string_view name, std::initializer_list<std::string_view> list) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// Whether one of the parts is in the text.
inline bool contains_one_of(std::string_view text, std::initializer_list<std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(), [text](std::string_view part) { return contains(text, part); });
}

}  // namespace oomdiag
