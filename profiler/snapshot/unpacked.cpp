#include "profiler/snapshot/unpacked.h"

#include <fmt/format.h>
#include <zlib.h>

#include <memory>
#include <vector>

#include "profiler/error.h"
#include "profiler/trace/unnamed_file.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void reject(const fs::path& packed, const std::string& why) {
  throw Error(ErrorKind::input, fmt::format("'{}' cannot be unpacked: {}", packed.string(), why));
}

void unpack(const fs::path& packed, UnnamedFile& file) {
  UnpackedStream stream(packed);
  std::vector<char> buffer(1 << 18);
  uint64_t written = 0;
  const uint64_t most = most_unpacked_bytes(packed);
  while (const std::streamsize count = stream.sgetn(buffer.data(), static_cast<std::streamsize>(buffer.size()))) {
    const auto bytes = static_cast<size_t>(count);
    if (written + bytes > most) reject(packed, kUnfoldsToTooMuch);
    file.write(written, buffer.data(), bytes);
    written += bytes;
  }
  if (stream.is_damaged()) reject(packed, "it is damaged or cut off");
}

}  // namespace

// Deflate reaches 1032 on zeros, of which a sparse trace is full; snapshots 20 to 40. More has several packed layers.
uint64_t most_unpacked_bytes(const fs::path& packed) {
  constexpr uint64_t kMaxRatio = 1100;
  return kMaxRatio * fs::file_size(packed);
}

UnpackedFile::UnpackedFile(const fs::path& packed) { unpack(packed, file_); }

UnpackedStream::UnpackedStream(const fs::path& file) : file_(gzopen(file.c_str(), "rb"), gzclose), buffer_(1 << 18) {
  if (!file_) throw Error(ErrorKind::input, fmt::format("cannot read '{}'", file.string()));
}

bool UnpackedStream::is_damaged() const {
  int error = Z_OK;
  gzerror(file_.get(), &error);
  return error != Z_OK && error != Z_STREAM_END;
}

UnpackedStream::int_type UnpackedStream::underflow() {
  const int count = gzread(file_.get(), buffer_.data(), static_cast<unsigned>(buffer_.size()));
  if (count <= 0) return traits_type::eof();
  setg(buffer_.data(), buffer_.data(), buffer_.data() + count);
  return traits_type::to_int_type(buffer_.front());
}

}  // namespace oomdiag
