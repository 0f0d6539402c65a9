#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

namespace oomdiag {

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Whether all of this text are digits.
inline bool is_number(std::string_view text) { return !text.empty() && std::ranges::all_of(text, is_digit); }

/// The number that all of this text is, as "-12"; nullopt for other texts, and for numbers of more than 64 bits.
inline std::optional<int64_t> parse_whole_number(std::string_view text) {
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && rest == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

}  // namespace oomdiag
