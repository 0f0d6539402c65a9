#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "profiler/error.h"

namespace oomdiag {

/// Variables over our own environment; nullopt takes one away.
using Environment = std::vector<std::pair<std::string, std::optional<std::string>>>;

/// A program to run as a child.
struct Program {
  std::vector<std::string> arguments;  ///< the first is looked up in PATH
  Environment environment;
  bool keeps_output = false;      ///< stdout and stderr go to `output.txt` in the run folder instead of ours
  std::filesystem::path input{};  ///< a file in place of our stdin; empty = ours
  std::string forked_by{};  ///< the socket of a process that forks it, see forked_program.h; empty = it is started anew
};

/// A program could not be started.
class NotStarted : public Error {
 public:
  NotStarted(const std::string& name, int error);

  /// As shells give it: 127 where there is no such program, 126 where it cannot be run.
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

/// Thrown where we are to end as the program did: by this signal.
struct KilledBySignal {
  int signal = 0;
};

/// How a child ended.
struct Ending {
  int exit_code = 0;
  int signal = 0;          ///< that killed it; 0 = none
  int interrupted_by = 0;  ///< a signal by which we were asked to end meanwhile: it did not run to its own end

  /// As a shell gives it: 128 + n after signal n.
  int code() const { return signal == 0 ? exit_code : 128 + signal; }
  bool operator==(const Ending&) const = default;
};

/// What is to be done again and again while a program runs.
struct Tick {
  std::chrono::milliseconds every{500};
  std::function<void()> work;
  std::function<bool()> is_enough{};  ///< asked after the work: true ends the program, with SIGTERM, then SIGKILL
};

/// Runs `program` to its end. `make_folder` is called with the child's pid before the program starts and gives its run
/// folder, which the child finds in OOMDIAG_OUTPUT. The child has our stdout, stderr, process group and signal settings, and our
/// stdin where it has no input of its own; signals that are sent to us meanwhile are passed on to it. Throws NotStarted if it cannot be started,
/// and whatever `make_folder` throws: then it is not started. `tick`, if there is one, is called meanwhile.
Ending launch(const Program& program, const std::function<std::filesystem::path(pid_t)>& make_folder,
              const std::optional<Tick>& tick = {});

/// In a child: takes these variables over.
void apply_environment(const Environment& environment);
/// In a child: becomes this program, the first word looked up in PATH. Returns only where that fails, with errno set.
void exec_program(const std::vector<std::string>& arguments);

/// What a short command writes to stdout, given no stdin and with its stderr thrown away; nullopt unless it exits 0.
std::optional<std::string> output_of(const std::vector<std::string>& arguments);

}  // namespace oomdiag
