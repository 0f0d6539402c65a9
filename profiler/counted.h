#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace oomdiag {

/// "1 run", "3 runs".
std::string counted(auto count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

}  // namespace oomdiag
