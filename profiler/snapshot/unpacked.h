#pragma once

#include <filesystem>

namespace oomdiag {

/// A gzip file unpacked into a nameless temporary one, which is gone with this object.
class UnpackedFile {
 public:
  /// Throws Error(input) for a damaged file or one that unpacks to a thousand times its size, Error(environment) where there
  /// is no room.
  explicit UnpackedFile(const std::filesystem::path& packed);
  ~UnpackedFile();
  UnpackedFile(const UnpackedFile&) = delete;
  UnpackedFile& operator=(const UnpackedFile&) = delete;

  /// To be opened while this object lives.
  std::filesystem::path path() const;

 private:
  int file_ = -1;
};

}  // namespace oomdiag
