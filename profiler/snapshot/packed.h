#pragma once

#include <memory>
#include <string>
#include <string_view>

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

}  // namespace oomdiag
