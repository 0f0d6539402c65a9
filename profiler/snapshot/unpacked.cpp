#include "profiler/snapshot/unpacked.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <memory>
#include <system_error>
#include <vector>

#include "profiler/error.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kMostRatio = 1000;  // deflate reaches 1032 on zeros; snapshots 20 to 40

[[noreturn]] void refuse(const fs::path& packed, const std::string& why) {
  throw Error(ErrorKind::input, fmt::format("'{}' cannot be unpacked: {}", packed.string(), why));
}

[[noreturn]] void fail(const fs::path& folder) {
  throw Error(ErrorKind::environment,
              fmt::format("cannot unpack into '{}': {}", folder.string(), std::generic_category().message(errno)),
              "set TMPDIR to a folder with room");
}

void write_all(int file, const std::vector<char>& buffer, size_t bytes, const fs::path& folder) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = write(file, buffer.data() + done, bytes - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail(folder);
    done += static_cast<size_t>(count);
  }
}

void unpack(const fs::path& packed, int file, const fs::path& folder) {
  UnpackedStream stream(packed);
  std::vector<char> buffer(1 << 18);
  uint64_t written = 0;
  const uint64_t most = kMostRatio * fs::file_size(packed);
  while (const std::streamsize count = stream.sgetn(buffer.data(), static_cast<std::streamsize>(buffer.size()))) {
    written += static_cast<uint64_t>(count);
    if (written > most) refuse(packed, "it unfolds to more than a thousand times its size");
    write_all(file, buffer, static_cast<size_t>(count), folder);
  }
  if (stream.is_damaged()) refuse(packed, "it is damaged or cut off");
}

}  // namespace

UnpackedFile::UnpackedFile(const fs::path& packed) {
  const fs::path folder = fs::temp_directory_path();
  file_ = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) fail(folder);
  try {
    unpack(packed, file_, folder);
  } catch (...) {
    close(file_);
    throw;
  }
}

UnpackedFile::~UnpackedFile() { close(file_); }

fs::path UnpackedFile::path() const { return fmt::format("/proc/self/fd/{}", file_); }

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
