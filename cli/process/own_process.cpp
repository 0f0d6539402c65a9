#include "cli/process/own_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <map>

#include "cli/process/signals.h"

namespace oomdiag {
namespace {

using Action = struct sigaction;

std::map<int, Action> inherited;  ///< what signals did before we changed it

Action set_handler(int signal, void (*handler)(int)) {
  Action action{}, old{};
  action.sa_handler = handler;
  sigaction(signal, &action, &old);
  return old;
}

}  // namespace

void open_missing_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0) open("/dev/null", O_RDWR | O_CLOEXEC);  // the lowest number that is free
  }
}

void keep_ended_children() { inherited.emplace(SIGCHLD, set_handler(SIGCHLD, SIG_DFL)); }

void ignore_broken_pipes() { inherited.emplace(SIGPIPE, set_handler(SIGPIPE, SIG_IGN)); }

void restore_inherited_signals() {
  for (const auto& [signal, action] : inherited) sigaction(signal, &action, nullptr);
}

void end_by(int signal) {
  prctl(PR_SET_DUMPABLE, 0);
  set_handler(signal, SIG_DFL);
  const sigset_t set = make_signals({signal});
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  kill(getpid(), signal);
}

}  // namespace oomdiag
