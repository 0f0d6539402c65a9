#pragma once

#include <string>
#include <string_view>

namespace oomdiag {

/// `text` as it stands between tags, or in quotes inside of one, of HTML and XML.
inline std::string escape_markup(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

}  // namespace oomdiag
