#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <streambuf>
#include <vector>

#include "profiler/trace/unnamed_file.h"

struct gzFile_s;

namespace oomdiag {

/// A packed file may take so many bytes unpacked.
uint64_t most_unpacked_bytes(const std::filesystem::path& packed);
inline constexpr const char* kUnfoldsToTooMuch = "it unfolds to more than a thousand times its size";

/// A gzip file unpacked into an unnamed one, which is gone with this object.
class UnpackedFile {
 public:
  /// Throws Error(input) for a damaged file or one that unpacks to more than most_unpacked_bytes(), Error(environment) where there
  /// is no space.
  explicit UnpackedFile(const std::filesystem::path& packed);

  /// To be opened while this object lives.
  std::filesystem::path path() const { return file_.path(); }

 private:
  UnnamedFile file_;
};

/// The bytes of a file from front to back; of one packed by gzip those that were packed.
class UnpackedStream : public std::streambuf {
 public:
  /// Throws Error(input) if it cannot be opened.
  explicit UnpackedStream(const std::filesystem::path& file);

  /// Whether it could not be unpacked to its end.
  bool is_damaged() const;

 protected:
  int_type underflow() override;

 private:
  std::unique_ptr<gzFile_s, int (*)(gzFile_s*)> file_;
  std::vector<char> buffer_;
};

}  // namespace oomdiag
