#include "cli/process/kept_input.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>

namespace oomdiag {
namespace {

constexpr int kSilenceMs = 1000;

enum class Source { file, pipe, none };

Source source_of(int descriptor) {
  struct stat info {};
  if (fstat(descriptor, &info) != 0) return Source::none;
  if (S_ISREG(info.st_mode)) return Source::file;
  return S_ISFIFO(info.st_mode) || S_ISSOCK(info.st_mode) ? Source::pipe : Source::none;
}

/// Whether there is something to read, the end too.
bool waits_for_data(int descriptor) {
  pollfd waited{.fd = descriptor, .events = POLLIN, .revents = 0};
  int ready = 0;
  do {
    ready = poll(&waited, 1, kSilenceMs);
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

}  // namespace

KeptInput keep_input(int descriptor, const std::filesystem::path& file) {
  KeptInput kept;
  const Source source = source_of(descriptor);
  if (source == Source::none) return kept;
  const off_t begin = source == Source::file ? lseek(descriptor, 0, SEEK_CUR) : 0;
  std::ofstream out;
  for (std::array<char, 65536> buffer{};;) {
    if (source == Source::pipe && !waits_for_data(descriptor)) {
      kept.is_whole = kept.bytes == 0;  // an empty one that nobody closes is what a shell's child often has
      return kept;
    }
    const ssize_t count = source == Source::file ? pread(descriptor, buffer.data(), buffer.size(), begin + kept.bytes)
                                                 : read(descriptor, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return kept;
    const int64_t taken = std::min<int64_t>(count, kMaxInput - kept.bytes);
    if (taken > 0 && !out.is_open()) out.open(file, std::ios::binary);
    out.write(buffer.data(), taken);
    kept.bytes += taken;
    kept.is_whole = taken == count;
    if (!kept.is_whole) return kept;
  }
}

}  // namespace oomdiag
