#include "profiler/snapshot/packed.h"

#include <fmt/format.h>
#include <zlib.h>

#include <array>
#include <memory>
#include <vector>

#include "profiler/error.h"
#include "profiler/trace/unnamed_file.h"

namespace oomdiag {

Packer::Packer() : stream_(std::make_unique<z_stream_s>()) {
  constexpr int kGzip = 16, kMemoryLevel = 8;
  if (deflateInit2(stream_.get(), Z_DEFAULT_COMPRESSION, Z_DEFLATED, MAX_WBITS + kGzip, kMemoryLevel,
                   Z_DEFAULT_STRATEGY) != Z_OK) {
    throw Error(ErrorKind::internal, "zlib cannot begin to pack");
  }
}

Packer::~Packer() { deflateEnd(stream_.get()); }

void Packer::add(std::string_view bytes) {
  if (!bytes.empty()) deflate_all(bytes, Z_NO_FLUSH);
}

std::string Packer::finish() {
  deflate_all({}, Z_FINISH);
  return std::move(packed_);
}

void Packer::deflate_all(std::string_view bytes, int flush) {
  std::array<unsigned char, 1 << 16> buffer{};
  stream_->next_in = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));  // zlib only reads it
  stream_->avail_in = static_cast<unsigned>(bytes.size());
  do {
    stream_->next_out = buffer.data();
    stream_->avail_out = static_cast<unsigned>(buffer.size());
    deflate(stream_.get(), flush);
    packed_.append(reinterpret_cast<const char*>(buffer.data()), buffer.size() - stream_->avail_out);
  } while (stream_->avail_out == 0);
}

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
