#include "cli/cache.h"

#include "cli/environment.h"

namespace oomdiag {

std::filesystem::path cache_folder() {
  if (const std::filesystem::path cache = environment("XDG_CACHE_HOME"); cache.is_absolute()) return cache / "oomdiag";
  if (const std::filesystem::path home = environment("HOME"); !home.empty()) return home / ".cache" / "oomdiag";
  return "/tmp/oomdiag-cache";
}

}  // namespace oomdiag
