#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "cli/process/files.h"
#include "cli/reports/reports.h"
#include "cli/terminal/terminal.h"
#include "cli/terminal/terminal_text.h"
#include "profiler/error.h"
#include "profiler/report/json/json.h"
#include "profiler/report/report.h"
#include "profiler/report/text/text.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

std::error_code last_error() { return {errno, std::generic_category()}; }

/// Writes into what is there, or a new file; `flags` are further ones of open(2).
std::error_code write_into(const fs::path& file, const std::string& text, mode_t mode, int flags) {
  const int descriptor = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | flags, mode);
  if (descriptor < 0) return last_error();
  std::error_code error;
  for (size_t written = 0; written < text.size() && !error;) {
    const ssize_t count = write(descriptor, text.data() + written, text.size() - written);
    if (count > 0) written += static_cast<size_t>(count);
    if (count == 0) error = std::make_error_code(std::errc::io_error);
    if (count < 0 && errno != EINTR) error = last_error();
  }
  if (close(descriptor) != 0 && !error) error = last_error();
  return error;
}

/// Puts a new file in the place of the one that is there, once all of it is written.
std::error_code replace(const fs::path& file, const std::string& text, mode_t mode) {
  const fs::path part = file.string() + ".part";
  std::error_code error = write_into(part, text, mode, O_NOFOLLOW), ignored;
  if (!error) fs::rename(part, file, error);
  if (error) fs::remove(part, ignored);
  return error;
}

}  // namespace

void keep_json(const Report& report, const fs::path& folder) { write_json(report, folder / "report.json", 0600); }

void write_json(const Report& report, const fs::path& file, mode_t mode) {
  write_whole(to_json(report) + "\n", file, mode);
}

std::string pack(const Report& report) { return report.folder + '\0' + to_json(report, /*indent=*/-1); }

Report unpack(std::string_view text) {
  const std::size_t end = text.find('\0');
  Report report = from_json(text.substr(end + 1));
  report.folder = text.substr(0, end);
  return report;
}

void write_whole(const std::string& text, const fs::path& file, mode_t mode) {
  const bool is_special = is_there(file) && !is_file(file);
  const std::error_code error = is_special ? write_into(file, text, mode, 0) : replace(file, text, mode);
  if (!error) return;
  throw Error(ErrorKind::environment, fmt::format("cannot write '{}': {}", file.string(), error.message()));
}

void check_writable(const fs::path& file, const char* option) {
  if (file.empty()) return;
  const fs::path folder = file.has_parent_path() ? file.parent_path() : ".";
  if (is_folder(file))
    throw Error(ErrorKind::usage, fmt::format("{} {} is a folder, not a file", option, file.string()));
  if (access(folder.c_str(), W_OK | X_OK) == 0) return;
  throw Error(ErrorKind::usage,
              fmt::format("{} {}: cannot write into the folder '{}'", option, file.string(), folder.string()),
              "make it first, or name another file");
}

void print_text(const Report& report, std::FILE* stream, bool all, const std::string& next) {
  const OutputCapabilities capabilities = output_capabilities(fileno(stream));
  const TextOptions options{.unicode = capabilities.unicode, .all = all, .next = next};
  const std::string text = terminal_text(to_text(report, options), capabilities);
  if (stream == stdout) return write_out(text);
  std::fwrite(text.data(), 1, text.size(), stream);
}

void print_json(const Report& report) { write_out(to_json(report) + "\n"); }

}  // namespace oomdiag
