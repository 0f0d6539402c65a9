#pragma once

#include <string>
#include <string_view>

#include "profiler/replay/history.h"

namespace oomdiag {

/// "train.py:11", else the module or op that is known.
inline std::string short_place(const Where& made) {
  const std::string_view line = made.source.substr(made.source.rfind('/') + 1);
  return std::string(line.empty() ? (made.module.empty() ? made.op : made.module) : line);
}

}  // namespace oomdiag
