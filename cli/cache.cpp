#include "cli/cache.h"

#include <cstdlib>

namespace oomdiag {

std::filesystem::path cache_folder() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  if (const auto cache = variable("XDG_CACHE_HOME"); cache.is_absolute()) return cache / "oomdiag";
  if (const auto home = variable("HOME"); !home.empty()) return home / ".cache" / "oomdiag";
  return "/tmp/oomdiag-cache";
}

}  // namespace oomdiag
