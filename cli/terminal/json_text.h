#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "profiler/report/words/json_text.h"  // IWYU pragma: export

namespace oomdiag {

inline constexpr int kCompact = -1, kIndented = 2;  ///< layouts of to_text()

/// JSON as text. What is no UTF-8 in it (file names, a program's words) is replaced by U+FFFD: dump() alone throws there.
inline std::string to_text(const nlohmann::json& json, int layout = kIndented) { return json_text(json, layout); }
inline std::string to_text(const nlohmann::ordered_json& json, int layout = kIndented) {
  return json_text(json, layout);
}

}  // namespace oomdiag
