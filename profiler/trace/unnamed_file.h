#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace oomdiag {

/// A file of mode 0600 without a name, in the folder for temporary files. It is gone with this object.
class UnnamedFile {
 public:
  /// Throws Error(environment) where it cannot be made.
  explicit UnnamedFile(std::filesystem::path folder = std::filesystem::temp_directory_path());
  ~UnnamedFile();
  UnnamedFile(const UnnamedFile&) = delete;
  UnnamedFile& operator=(const UnnamedFile&) = delete;

  /// Throws Error(environment) where the disk is full.
  void write(uint64_t offset, const char* bytes, size_t count);
  /// To be opened while this object lives; what was opened stays readable.
  std::filesystem::path path() const;

 private:
  std::filesystem::path folder_;
  int file_ = -1;
};

/// The same where the file system knows no O_TMPFILE: a name is made and taken away. A descriptor; below 0 it failed.
int open_and_unlink(const std::filesystem::path& folder);

}  // namespace oomdiag
