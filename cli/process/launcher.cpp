#include "cli/process/launcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "cli/process/files.h"
#include "cli/process/forked_program.h"
#include "cli/process/own_process.h"
#include "cli/process/process_tree.h"
#include "cli/process/signals.h"
#include "extension/environment.h"
#include "profiler/error.h"

// The parent forks, learns the child's pid, makes the run folder that is named after it and sends its path down a pipe
// on which the child waits. A second pipe, closed by a successful exec or fork, brings back the errno of a failed exec.
//
//   parent   fork ── make_folder(pid) ── path ─┐             ┌─ errno or end of file ── wait, pass signals on
//   child      └──────── read ◄────────────────┘ ── exec ────┘

namespace oomdiag {
namespace {

/// Both ends close on exec.
struct Pipe {
  Pipe() {
    if (pipe2(ends.data(), O_CLOEXEC) != 0) {
      throw Error(ErrorKind::environment, fmt::format("cannot make a pipe: {}", std::strerror(errno)));
    }
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  void close_end(std::size_t end) {
    if (ends[end] >= 0) close(ends[end]);
    ends[end] = -1;
  }

  void send(const void* data, std::size_t size) const {
    for (const char* next = static_cast<const char*>(data); size > 0;) {
      const ssize_t count = write(ends[1], next, size);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;  // the other side is gone: whoever waits for it will see that
      next += count;
      size -= static_cast<std::size_t>(count);
    }
  }

  std::string receive_all() const {
    std::string result;
    std::array<char, 4096> buffer{};
    for (;;) {
      const ssize_t count = read(ends[0], buffer.data(), buffer.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return result;
      result.append(buffer.data(), static_cast<std::size_t>(count));
    }
  }

  std::array<int, 2> ends{-1, -1};
};

void redirect(const std::filesystem::path& file) {
  const int descriptor = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (descriptor < 0) return;
  dup2(descriptor, STDOUT_FILENO);
  dup2(descriptor, STDERR_FILENO);
}

void redirect_input(const std::filesystem::path& file) {
  const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor >= 0) dup2(descriptor, STDIN_FILENO);
}

/// In the child: waits for the run folder, then becomes the program.
[[noreturn]] void become(const Program& program, Pipe& start, Pipe& failure, const BlockedSignals& signals) {
  // Who ends us by SIGKILL, as Python's subprocess does after its timeout, means the program, and waits for its output.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  start.close_end(1);  // where we are gone before that call, no folder comes
  const std::string folder = start.receive_all();
  if (folder.empty()) _exit(127);  // the parent could not make one and says so itself
  apply_environment(program.environment);
  setenv(variables::kOutput, folder.c_str(), 1);
  if (!program.input.empty()) redirect_input(program.input);
  if (program.keeps_output) redirect(std::filesystem::path(folder) / "output.txt");
  signals.restore();
  const auto tell_parent = [&failure] { failure.close_end(1); };  // no exec does it
  if (!program.forked_by.empty()) become_by_fork(program.forked_by, program.arguments, tell_parent);
  exec_program(program.arguments);
  const int error = errno;
  failure.send(&error, sizeof error);
  _exit(127);
}

bool has_ended(pid_t child) {
  siginfo_t ended{};
  return waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid != 0;
}

/// Asks the child to end. What has not ended within a second of it and of what it started, as the ranks of torchrun, is
/// made to; where the child ends by itself before that, what it left behind too.
void end_at_once(pid_t child) {
  const std::vector<KnownProcess> tree = find_tree(child);
  kill(child, SIGTERM);
  constexpr useconds_t kMoment = 10'000;
  for (int i = 0; i < 100 && !has_ended(child); ++i) usleep(kMoment);
  kill_processes(tree);
  kill_processes(find_tree(child));
}

void note(const siginfo_t& info, Ending& ending) {
  const int signal = info.si_signo;
  if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT) ending.interrupted_by = signal;
}

/// Whether another process sent it to us alone. Ctrl-C and Ctrl-\ come from the terminal, to the whole foreground group.
bool is_for_us_alone(const siginfo_t& info, GroupWitness& witness) {
  const bool was_for_group = witness.received(info.si_signo);
  return info.si_code <= 0 && !was_for_group;
}

/// Waits for the child and passes on what the program did not get itself.
Ending wait_for(pid_t child, const BlockedSignals& signals, GroupWitness& witness, const std::optional<Tick>& tick) {
  Ending ending;
  for (;;) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      if (WIFSIGNALED(status)) {
        ending.signal = WTERMSIG(status);
      } else {
        ending.exit_code = WEXITSTATUS(status);
      }
      // What came at the same time would else be delivered to us as soon as signals are no longer held back.
      for (siginfo_t info{}; signals.wait(std::chrono::milliseconds(0), info) > 0;) note(info, ending);
      return ending;
    }
    siginfo_t info{};
    const int signal = tick ? signals.wait(tick->every, info) : sigwaitinfo(&signals.set(), &info);
    if (signal > 0) note(info, ending);
    if (signal > 0 && signal != SIGCHLD && is_for_us_alone(info, witness)) kill(child, signal);
    if (signal < 0 && tick) {
      tick->work();
      if (tick->is_enough && tick->is_enough()) end_at_once(child);
    }
  }
}

/// What to type instead.
std::string hint_for(const std::string& name, int error) {
  const bool is_here = name.find('/') == name.npos && is_file(name);
  if (error == EACCES) return "is it executable? chmod +x " + name;
  if (error != ENOENT) return {};
  if (is_here) return "programs without a folder are looked up in PATH; the one here is: oomdiag run -- ./" + name;
  return "is it installed, and in PATH? oomdiag run -- PROGRAM takes what you would type in a shell";
}

}  // namespace

NotStarted::NotStarted(const std::string& name, int error)
    : Error(ErrorKind::input, fmt::format("cannot run '{}': {}", name, std::strerror(error)), hint_for(name, error)),
      exit_code_(error == ENOENT ? 127 : 126) {}

Ending launch(const Program& program, const std::function<std::filesystem::path(pid_t)>& make_folder,
              const std::optional<Tick>& tick) {
  sigset_t waited = passed_signals();
  sigaddset(&waited, SIGCHLD);
  const BlockedSignals signals(waited);
  GroupWitness witness;  // before the pipes, of which it would keep an end open
  Pipe start;
  Pipe failure;
  const pid_t child = fork();
  if (child < 0) throw Error(ErrorKind::environment, fmt::format("cannot start a process: {}", std::strerror(errno)));
  if (child == 0) become(program, start, failure, signals);

  failure.close_end(1);
  try {
    const std::string folder = make_folder(child).string();
    start.send(folder.data(), folder.size());
  } catch (...) {
    start.close_end(1);
    waitpid(child, nullptr, 0);
    throw;
  }
  start.close_end(1);
  if (const std::string error = failure.receive_all(); error.size() == sizeof(int)) {
    waitpid(child, nullptr, 0);
    int number = 0;
    std::memcpy(&number, error.data(), sizeof number);
    throw NotStarted(program.arguments.front(), number);
  }
  return wait_for(child, signals, witness, tick);
}

void apply_environment(const Environment& environment) {
  for (const auto& [name, value] : environment) {
    value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
  }
}

void exec_program(const std::vector<std::string>& arguments) {
  std::vector<char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  restore_inherited_signals();
  execvp(pointers.front(), pointers.data());
}

std::optional<std::string> output_of(const std::vector<std::string>& arguments) {
  Pipe output;
  const pid_t child = fork();
  if (child < 0) return std::nullopt;
  if (child == 0) {
    const int nothing = open("/dev/null", O_RDWR);
    dup2(nothing, STDIN_FILENO);
    dup2(output.ends[1], STDOUT_FILENO);
    dup2(nothing, STDERR_FILENO);
    exec_program(arguments);
    _exit(127);
  }
  output.close_end(1);
  std::string text = output.receive_all();
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return std::nullopt;
  return text;
}

}  // namespace oomdiag
