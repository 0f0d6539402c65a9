#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "profiler/report/json_text.h"

namespace oomdiag {

inline constexpr int kCompact = -1, kIndented = 2;  ///< layouts of to_text()

/// JSON as text. What is no UTF-8 in it (file names, a program's words) is replaced by U+FFFD: dump() alone throws there.
inline std::string to_text(const nlohmann::json& json, int layout = kIndented) { return json_text(json, layout); }
inline std::string to_text(const nlohmann::ordered_json& json, int layout = kIndented) {
  return json_text(json, layout);
}

/// The value, or null.
template <class Value>
nlohmann::ordered_json optional_json(const std::optional<Value>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace oomdiag
