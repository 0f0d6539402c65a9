#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <streambuf>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/trace/unnamed_file.h"

struct gzFile_s;
struct z_stream_s;

namespace oomdiag {

/// Packs bytes by gzip as they come: the same bytes give the same file.
class Packer {
 public:
  Packer();
  ~Packer();
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  void add(std::string_view bytes);
  /// The whole file. Nothing can be added after it.
  std::string finish();

 private:
  void deflate_all(std::string_view bytes, int flush);

  std::unique_ptr<z_stream_s> stream_;
  std::string packed_;
};

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
