#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "cli/reports.h"
#include "cli/terminal.h"
#include "profiler/error.h"
#include "profiler/report/json.h"
#include "profiler/report/text.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

/// False with errno if not all of it was written.
bool write_file(const fs::path& file, const std::string& text, mode_t mode, int follows) {
  const int descriptor = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | follows, mode);
  if (descriptor < 0) return false;
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(descriptor, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    written += static_cast<size_t>(count);
  }
  const int error = errno;
  const bool closed = close(descriptor) == 0;
  if (closed) errno = error;
  return closed && written == text.size();
}

}  // namespace

void keep_json(const Report& report, const fs::path& folder) { write_json(report, folder / "report.json", 0600); }

void write_json(const Report& report, const fs::path& file, mode_t mode) {
  write_whole(to_json(report) + "\n", file, mode);
}

void write_whole(const std::string& text, const fs::path& file, mode_t mode) {
  std::error_code error;
  const bool is_device = fs::exists(file, error) && !fs::is_regular_file(file, error);  // /dev/stdout: to be kept
  const fs::path part = is_device ? file : fs::path(file.string() + ".part");
  error.clear();
  if (!write_file(part, text, mode, is_device ? 0 : O_NOFOLLOW)) error.assign(errno, std::generic_category());
  if (!error && !is_device) fs::rename(part, file, error);
  if (!error) return;
  std::error_code ignored;
  if (!is_device) fs::remove(part, ignored);
  throw Error(ErrorKind::environment, fmt::format("cannot write '{}': {}", file.string(), error.message()));
}

void check_writable(const fs::path& file) {
  if (file.empty()) return;
  const fs::path folder = file.has_parent_path() ? file.parent_path() : ".";
  std::error_code ignored;
  if (fs::is_directory(file, ignored))
    throw Error(ErrorKind::usage, fmt::format("-o {} is a folder, not a file", file.string()));
  if (access(folder.c_str(), W_OK | X_OK) == 0) return;
  throw Error(ErrorKind::usage, fmt::format("-o {}: cannot write into the folder '{}'", file.string(), folder.string()),
              "make it first, or name another file");
}

void print_text(const Report& report, std::FILE* stream) {
  const Manners manners = manners_of(fileno(stream));
  std::string text = to_text(report, {.unicode = manners.unicode});
  if (manners.color) {
    const std::size_t headline = std::min(text.find('\n'), text.size());
    text = fmt::format("\033[1m{}\033[0m{}", text.substr(0, headline), text.substr(headline));
  }
  if (stream == stdout) return write_out(text);
  std::fwrite(text.data(), 1, text.size(), stream);
}

void print_json(const Report& report) { write_out(to_json(report) + "\n"); }

}  // namespace oomdiag
