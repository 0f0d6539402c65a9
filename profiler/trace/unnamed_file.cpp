#include "profiler/trace/unnamed_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>
#include <utility>

#include "profiler/error.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail(const fs::path& folder) {
  throw Error(ErrorKind::environment,
              "cannot write to '" + folder.string() + "': " + std::generic_category().message(errno),
              "set TMPDIR to a folder with free space");
}

// Overlay file systems know O_TMPFILE from Linux 6.1 on, some others never.
int open_unnamed(const fs::path& folder) {
  const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  return file >= 0 ? file : open_and_unlink(folder);
}

}  // namespace

int open_and_unlink(const fs::path& folder) {
  std::string name = (folder / "oomdiag-XXXXXX").string();
  const int file = mkostemp(name.data(), O_CLOEXEC);  // of mode 0600
  if (file >= 0) unlink(name.c_str());
  return file;
}

UnnamedFile::UnnamedFile(fs::path folder) : folder_(std::move(folder)), file_(open_unnamed(folder_)) {
  if (file_ < 0) fail(folder_);
}

UnnamedFile::~UnnamedFile() { close(file_); }

void UnnamedFile::write(uint64_t offset, const char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t written = pwrite(file_, bytes, count, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(folder_);
    bytes += written;
    offset += static_cast<uint64_t>(written);
    count -= static_cast<size_t>(written);
  }
}

fs::path UnnamedFile::path() const { return "/proc/self/fd/" + std::to_string(file_); }

}  // namespace oomdiag
