#pragma once

#include <string>

#include "profiler/report/printable.h"

namespace oomdiag {

/// A value of nlohmann's as text. A string in it may hold any bytes: those that are no UTF-8 are replaced, and characters
/// that a terminal obeys escaped. With `indent` ≥ 0 over several lines.
template <class Json>
std::string json_text(const Json& json, int indent = -1) {
  return escape_controls(json.dump(indent, ' ', false, Json::error_handler_t::replace));
}

}  // namespace oomdiag
