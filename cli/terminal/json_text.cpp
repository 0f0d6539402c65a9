#include "cli/terminal/json_text.h"

#include <nlohmann/json.hpp>

namespace oomdiag {

std::string to_text(const nlohmann::json& json, int layout) {
  return json.dump(layout, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string to_text(const nlohmann::ordered_json& json, int layout) {
  return json.dump(layout, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace oomdiag
