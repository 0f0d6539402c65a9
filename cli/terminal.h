#pragma once

#include <string_view>

namespace oomdiag {

/// What may be written to an output.
struct Manners {
  bool is_terminal = false;
  bool moves_cursor = false;  ///< a terminal that can do more than print: not TERM=dumb
  bool color = false;         ///< a terminal, without NO_COLOR and not TERM=dumb
  bool unicode = false;       ///< the locale is UTF-8
};

/// Manners for a file descriptor, from the environment.
Manners manners_of(int descriptor);

/// One line on stderr: "oomdiag: <text>".
void say(std::string_view text);

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

}  // namespace oomdiag
