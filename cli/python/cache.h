#pragma once

#include <filesystem>

namespace oomdiag {

/// Where things are kept that can be rebuilt: $XDG_CACHE_HOME/oomdiag, else ~/.cache/oomdiag, with the home folder of
/// $HOME or of the password database. Need not exist. Throws Error(environment) for a user who has none of these.
std::filesystem::path cache_folder();

/// `name` below the cache folder, for code that will be loaded; made where it is missing, with mode 0700. Throws
/// Error(environment) where it cannot be made, or where check_only_own or a folder above it says that others can write it.
std::filesystem::path own_folder_in_cache(const std::filesystem::path& name);

/// Throws Error(environment) unless a file or folder belongs to the effective user or to root, and nobody else may write it: code
/// in it would be another user's. sshd has the same rule for its files.
void check_only_own(const std::filesystem::path& path);

}  // namespace oomdiag
