#include "cli/process/own_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <optional>

namespace oomdiag {
namespace {

using Action = struct sigaction;

std::optional<Action> before;  ///< what SIGPIPE did before we ignored it

}  // namespace

void open_missing_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0) open("/dev/null", O_RDWR | O_CLOEXEC);  // the lowest number that is free
  }
}

void ignore_broken_pipes() {
  Action ignored{}, old{};
  ignored.sa_handler = SIG_IGN;
  if (!before && sigaction(SIGPIPE, &ignored, &old) == 0) before = old;
}

void restore_broken_pipes() {
  if (before) sigaction(SIGPIPE, &*before, nullptr);
}

void end_by(int signal) {
  std::fflush(nullptr);
  prctl(PR_SET_DUMPABLE, 0);
  Action standard{};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  kill(getpid(), signal);
}

}  // namespace oomdiag
