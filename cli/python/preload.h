#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "cli/process/temporary_folder.h"

namespace oomdiag {

/// What goes into LD_PRELOAD, in this order.
struct PreloadParts {
  std::string first;                     ///< sanitizer runtimes, which want to be first
  std::filesystem::path libraries;       ///< folder of liboomdiag_preload.so
  std::filesystem::path virtual_device;  ///< folder of the virtual device's libraries; empty = real device
  int cuda_major = 0;                    ///< of the program's torch, whose libraries are enough; 0 = not known, both
  std::string users_own;                 ///< the LD_PRELOAD that was there
};

/// The value of LD_PRELOAD: what exists of our libraries between `first` and `users_own`.
std::string compose_preload(const PreloadParts& parts);

/// Whether the loader takes `path` in LD_PRELOAD as it is: it splits at spaces and colons and expands '$'.
bool can_be_preloaded(const std::filesystem::path& path);

/// Another name for a folder that the loader takes in LD_PRELOAD: the folder itself, or where its path cannot be used a
/// link in a private temporary folder, which goes when this object does.
class PreloadFolder {
 public:
  /// Throws Error(environment) if no link can be made.
  explicit PreloadFolder(const std::filesystem::path& folder);

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::optional<TemporaryFolder> link_;
};

}  // namespace oomdiag
