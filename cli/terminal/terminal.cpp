#include "cli/terminal/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cli/process/environment.h"
#include "profiler/counted.h"
#include "profiler/error.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

/// As the C library finds it: the first of the three that is set decides.
bool has_utf8_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string locale = environment(name);
    if (locale.empty()) continue;
    for (const char* spelling : {"UTF-8", "utf8", "UTF8", "utf-8"}) {
      if (locale.find(spelling) != std::string_view::npos) return true;
    }
    return false;
  }
  return false;
}

}  // namespace

TerminalSize terminal_size(int descriptor) {
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0) return {};
  return {.rows = size.ws_row, .columns = size.ws_col};
}

OutputCapabilities output_capabilities(int descriptor) {
  OutputCapabilities capabilities{.is_terminal = isatty(descriptor) == 1, .unicode = has_utf8_locale()};
  capabilities.moves_cursor = capabilities.is_terminal && environment("TERM") != "dumb" && !environment("TERM").empty();
  capabilities.color = capabilities.is_terminal && environment("NO_COLOR").empty() && environment("TERM") != "dumb";
  capabilities.columns = terminal_size(descriptor).columns;
  return capabilities;
}

void say(std::string_view text) { complain(fmt::format("oomdiag: {}\n", text)); }

void complain(const std::string& lines) {
  const std::string safe = printable_lines(lines);
  std::fwrite(safe.data(), 1, safe.size(), stderr);
}

void write_out(const std::string& text) {
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (written && std::fflush(stdout) == 0) return;
  throw Error(ErrorKind::environment, fmt::format("cannot write to stdout: {}", std::strerror(errno)));
}

void finish_output() {
  errno = 0;
  const bool failed_before = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !failed_before) return;
  const std::string reason = errno == 0 ? "part of it was not taken" : std::strerror(errno);
  throw Error(ErrorKind::environment, fmt::format("cannot write to stdout: {}", reason));
}

Progress::Progress(std::string_view text) : shown_(output_capabilities(STDERR_FILENO).moves_cursor) {
  if (shown_) std::fputs((printable(text, text.size()) + "\r").c_str(), stderr);
}

Progress::~Progress() {
  if (shown_) std::fputs("\033[2K\r", stderr);
}

std::string steps_text(std::string_view what, std::size_t over, std::size_t all, double seconds) {
  if (all <= over || over == 0) return fmt::format("{}: {} so far, {:.0f} s", what, counted(over, "run"), seconds);
  const double left = seconds / static_cast<double>(over) * static_cast<double>(all - over);
  return fmt::format("{}: {} of about {} runs, {:.0f} s left", what, over, all, left);
}

Steps::Steps(std::string_view what) : what_(what) { line_.emplace(fmt::format("{}: first run ...", what_)); }

void Steps::show(std::size_t over, std::size_t all) {
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_;
  line_.reset();
  const std::string text = steps_text(what_, over, all, since.count());
  line_.emplace(text);
  constexpr std::chrono::seconds kBetweenLines{10};  // a log is to show that it goes on, not to fill
  const auto now = std::chrono::steady_clock::now();
  if (output_capabilities(STDERR_FILENO).moves_cursor || now - last_line_ < kBetweenLines) return;
  last_line_ = now;
  say(text);
}

}  // namespace oomdiag
