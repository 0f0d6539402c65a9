#pragma once

#include <filesystem>

namespace oomdiag {

/// A private folder in the temporary one, which goes with all that is in it when this object does.
class TemporaryFolder {
 public:
  /// In `parent`, by default where temporary files go. Throws Error(environment) if none can be made.
  explicit TemporaryFolder(std::filesystem::path parent = {});
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace oomdiag
