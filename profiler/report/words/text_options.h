#pragma once

#include <string>

namespace oomdiag {

/// How a report is shown.
struct TextOptions {
  bool unicode = true;  ///< arrows and bars; false where the locale is not UTF-8
  bool all = false;     ///< every table; else the first screen, at most 24 lines
  std::string next{};   ///< the command to go on with, where it is none about the report
};

}  // namespace oomdiag
