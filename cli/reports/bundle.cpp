// A bundle is a tar archive (POSIX ustar), so that anybody can look into it without us:
//
//   tar tzf oomdiag-4711.bundle.tar.gz      report.json  run.json  trace  rank-1/report.json  rank-1/trace
//
// It comes from somebody else: of the names in it only those are taken that a run writes, one folder deep, and sparse
// files are sparse again.

#include "cli/reports/bundle.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "cli/process/files.h"
#include "cli/reports/run_folder.h"
#include "profiler/error.h"
#include "profiler/snapshot/packed.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

constexpr size_t kBlock = 512;
constexpr size_t kPiece = 1 << 20;
constexpr std::array<const char*, 4> kBundled = {"report.json", kRunConfigFile.data(), kFixFile.data(), "trace"};

/// The head of one file in a tar archive; numbers are octal text.
struct Header {
  char name[100], mode[8], user[8], group[8], size[12], time[12], checksum[8], kind, link[100], magic[6], version[2],
      rest[247];
};
static_assert(sizeof(Header) == kBlock);

unsigned checksum_of(Header header) {
  std::memset(header.checksum, ' ', sizeof header.checksum);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&header);
  unsigned sum = 0;
  for (size_t i = 0; i < kBlock; ++i) sum += bytes[i];
  return sum;
}

Header make_header(const std::string& name, uint64_t size) {
  constexpr uint64_t kMaxSize = uint64_t{1} << 33;  // 11 octal digits
  if (size >= kMaxSize) {
    throw Error(ErrorKind::input, fmt::format("{} has {} GiB: a bundle holds files below 8 GiB", name, size >> 30),
                "of the report alone: oomdiag export --to bundle --redact");
  }
  Header header{};
  std::strncpy(header.name, name.c_str(), sizeof header.name - 1);
  std::memcpy(header.mode, "0000600", 7);
  std::memcpy(header.user, "0000000", 7);
  std::memcpy(header.group, "0000000", 7);
  fmt::format_to_n(header.size, 11, "{:011o}", size);
  std::memcpy(header.time, "00000000000", 11);
  header.kind = '0';
  std::memcpy(header.magic, "ustar", 5);
  std::memcpy(header.version, "00", 2);
  fmt::format_to_n(header.checksum, 7, "{:06o}", checksum_of(header));
  return header;
}

void add_header(Packer& packer, const std::string& name, uint64_t size) {
  const Header header = make_header(name, size);
  packer.add({reinterpret_cast<const char*>(&header), sizeof header});
}

void pad(Packer& packer, uint64_t size) { packer.add(std::string((kBlock - size % kBlock) % kBlock, '\0')); }

void add_text(Packer& packer, const std::string& name, const std::string& text) {
  add_header(packer, name, text.size());
  packer.add(text);
  pad(packer, text.size());
}

/// A trace may grow meanwhile: what it has now is taken.
void add_file(Packer& packer, const std::string& name, const fs::path& file) {
  std::error_code error;
  const uint64_t size = fs::file_size(file, error);
  std::ifstream stream(file, std::ios::binary);
  if (error || !stream) throw Error(ErrorKind::input, fmt::format("cannot read '{}'", file.string()));
  add_header(packer, name, size);
  std::string piece;
  for (uint64_t left = size; left > 0; left -= piece.size()) {
    piece.assign(std::min<uint64_t>(left, kPiece), '\0');
    stream.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    packer.add(piece);
  }
  pad(packer, size);
}

std::string finish(Packer& packer) {
  packer.add(std::string(2 * kBlock, '\0'));
  return packer.finish();
}

/// "trace", "rank-1/trace": what make_bundle() writes.
bool may_be_taken(const fs::path& name) {
  const auto words = std::distance(name.begin(), name.end());
  const std::string first = name.begin()->string();
  return !name.is_absolute() && first != ".." && first != "." && (words == 1 || words == 2) &&
         std::ranges::find(kBundled, name.filename().string()) != kBundled.end();
}

/// Writes to a file, and leaves out what is zero.
class SparseFile {
 public:
  explicit SparseFile(const fs::path& file) : path_(file) {
    descriptor_ = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor_ < 0) fail();
  }
  ~SparseFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  SparseFile(const SparseFile&) = delete;
  SparseFile& operator=(const SparseFile&) = delete;

  void add(std::string_view bytes) {
    const bool is_hole = bytes.find_first_not_of('\0') == bytes.npos;
    if (!is_hole && pwrite(descriptor_, bytes.data(), bytes.size(), written_) != static_cast<ssize_t>(bytes.size()))
      fail();
    written_ += static_cast<off_t>(bytes.size());
  }
  void finish() {
    if (ftruncate(descriptor_, written_) != 0) fail();
  }

 private:
  [[noreturn]] void fail() const {
    throw Error(ErrorKind::environment, fmt::format("cannot write '{}': {}", path_.string(), std::strerror(errno)),
                "TMPDIR names another folder");
  }

  fs::path path_;
  int descriptor_ = -1;
  off_t written_ = 0;
};

/// Reads a bundle front to back.
class BundleReader {
 public:
  explicit BundleReader(const fs::path& packed)
      : packed_(packed), stream_(packed), most_(most_unpacked_bytes(packed)) {}

  void unpack_into(const fs::path& folder) {
    for (Header header{}; read_header(header);) {
      header.name[sizeof header.name - 1] = '\0';
      const uint64_t size = std::strtoull(header.size, nullptr, 8);
      const fs::path name(header.name);
      if (header.kind == '0' && !name.empty() && may_be_taken(name)) {
        fs::create_directories((folder / name).parent_path());
        SparseFile file(folder / name);
        copy(size, [&](std::string_view piece) { file.add(piece); });
        file.finish();
      } else {
        copy(size, [](std::string_view) {});
      }
    }
  }

 private:
  [[noreturn]] void reject(const char* why) const {
    throw Error(ErrorKind::input, fmt::format("'{}' cannot be unpacked: {}", packed_.string(), why));
  }
  void read(char* bytes, size_t count) {
    if ((read_ += count) > most_) reject(kUnfoldsToTooMuch);
    if (stream_.sgetn(bytes, static_cast<std::streamsize>(count)) != static_cast<std::streamsize>(count)) {
      reject("it is damaged or cut off");
    }
  }
  /// False at the end of the archive.
  bool read_header(Header& header) {
    read(reinterpret_cast<char*>(&header), sizeof header);
    if (header.name[0] == '\0') return false;
    if (std::strtoul(header.checksum, nullptr, 8) != checksum_of(header)) reject("it is damaged or cut off");
    return true;
  }
  template <class Take>
  void copy(uint64_t size, const Take& take) {
    std::string piece;
    for (uint64_t left = size; left > 0; left -= piece.size()) {
      piece.resize(std::min<uint64_t>(left, 1 << 16));
      read(piece.data(), piece.size());
      take(piece);
    }
    std::array<char, kBlock> padding{};
    read(padding.data(), (kBlock - size % kBlock) % kBlock);
  }

  fs::path packed_;
  UnpackedStream stream_;
  uint64_t most_, read_ = 0;
};

}  // namespace

std::string make_bundle(const fs::path& folder) {
  std::vector<fs::path> folders{folder};
  for (const fs::path& trace : find_traces(folder)) {
    if (trace.parent_path() != folder) folders.push_back(trace.parent_path());
  }
  if (find_traces(folder).empty()) {
    throw Error(ErrorKind::input, fmt::format("'{}' holds no trace", folder.string()),
                "--to bundle takes a run folder, oomdiag-<pid>");
  }
  Packer packer;
  for (const fs::path& part : folders) {
    for (const char* name : kBundled) {
      if (!is_file(part / name)) continue;
      add_file(packer, (part / name).lexically_relative(folder).string(), part / name);
    }
  }
  return finish(packer);
}

std::string make_bundle_of_report(const std::string& json) {
  Packer packer;
  add_text(packer, "report.json", json);
  return finish(packer);
}

bool is_bundle(const fs::path& packed) {
  UnpackedStream stream(packed);
  Header header{};
  return stream.sgetn(reinterpret_cast<char*>(&header), kBlock) == static_cast<std::streamsize>(kBlock) &&
         std::string_view(header.magic, 5) == "ustar";
}

void unpack_bundle(const fs::path& packed, const fs::path& folder) { BundleReader(packed).unpack_into(folder); }

}  // namespace oomdiag
