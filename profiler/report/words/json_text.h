#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "profiler/report/words/printable.h"

namespace oomdiag {

/// A value of nlohmann's as text. A string in it may hold any bytes: those that are no UTF-8 are replaced, and characters
/// that a terminal obeys escaped. With `indent` ≥ 0 over several lines.
template <class Json>
std::string json_text(const Json& json, int indent = -1) {
  return escape_controls(json.dump(indent, ' ', false, Json::error_handler_t::replace));
}

/// A text, null where it is empty.
inline nlohmann::ordered_json text_or_null(std::string_view text) {
  return text.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(text);
}

/// The value, or null.
template <class Value>
nlohmann::ordered_json optional_json(const std::optional<Value>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace oomdiag
