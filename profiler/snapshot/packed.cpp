#include "profiler/snapshot/packed.h"

#include <zlib.h>

#include <array>

#include "profiler/error.h"

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

}  // namespace oomdiag
