#pragma once

#include <filesystem>

namespace oomdiag {

/// Where things are kept that can be made again: $XDG_CACHE_HOME/oomdiag, else ~/.cache/oomdiag. Need not exist.
std::filesystem::path cache_folder();

}  // namespace oomdiag
