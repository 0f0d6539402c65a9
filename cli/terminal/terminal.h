#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "cli/process/workers.h"

namespace oomdiag {

/// What may be written to an output.
struct OutputCapabilities {
  bool is_terminal = false;
  bool moves_cursor = false;  ///< a terminal that can do more than print: not TERM=dumb
  bool color = false;         ///< a terminal, without NO_COLOR and not TERM=dumb
  bool unicode = false;       ///< the locale is UTF-8
  std::size_t columns = 0;    ///< of a terminal; 0 where it does not say
};

struct TerminalSize {
  std::size_t rows = 0, columns = 0;
};

/// Zeros where the descriptor is no terminal, or one that does not say.
TerminalSize terminal_size(int descriptor);

/// OutputCapabilities for a file descriptor, from the environment.
OutputCapabilities output_capabilities(int descriptor);

/// One line on stderr: "oomdiag: <text>". Where stderr takes nothing it is lost: what a program's run is worth does not hang on it.
void say(std::string_view text);
/// The same for lines that are whole.
void complain(const std::string& lines);

/// Writes results to stdout. Throws Error(environment) if they do not arrive.
void write_out(const std::string& text);
/// To be called at the end: throws Error(environment) if something that was printed to stdout did not arrive.
void finish_output();

/// A line on stderr that shows what is going on and goes when the object does; nothing where stderr is no terminal.
class Progress {
 public:
  explicit Progress(std::string_view text);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  bool shown_ = false;
};

/// "fit: 4 runs so far, 35 s", or "ranks: 4 of about 8 runs, 35 s left".
std::string steps_text(std::string_view what, std::size_t over, std::size_t all, double seconds);

/// Such a line for many runs: how many are over, since when, and, where it is known how many there are, about how long the rest
/// takes. Where stderr is no terminal a line of its own every ten seconds.
class Steps {
 public:
  explicit Steps(std::string_view what);

  /// `over` of `all` are over; 0: nobody knows how many there will be.
  void show(std::size_t over, std::size_t all = 0);
  void hide() { line_.reset(); }
  /// What `search` finds, with this line while it searches. Of an interrupted one `say_so_far` says what it found, and Interrupted goes on up.
  auto show_during(const auto& search, const auto& say_so_far) {
    try {
      auto found = search();
      hide();
      return found;
    } catch (const Interrupted&) {
      hide();
      say_so_far();
      throw;
    }
  }

 private:
  std::string what_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now(), last_line_ = start_;
  std::optional<Progress> line_;
};

}  // namespace oomdiag
