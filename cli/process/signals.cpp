#include "cli/process/signals.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace oomdiag {
namespace {

/// Answers until the other end is closed: for each signal that it is asked for, whether it is pending here.
[[noreturn]] void bear_witness(int socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "oomdiag-signals");
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    close(stream);  // nobody waits for our end of them
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  for (unsigned char signal = 0; recv(socket, &signal, 1, 0) == 1;) {
    const sigset_t one = make_signals({int{signal}});
    const timespec now{};
    const char is_pending = sigtimedwait(&one, nullptr, &now) > 0 ? 1 : 0;
    if (send(socket, &is_pending, 1, MSG_NOSIGNAL) != 1) break;
  }
  _exit(0);
}

}  // namespace

sigset_t make_signals(std::initializer_list<int> numbers) {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : numbers) sigaddset(&set, number);
  return set;
}

sigset_t passed_signals() {
  sigset_t set;
  sigfillset(&set);
  for (const int number : {SIGCHLD, SIGPIPE, SIGXFSZ, SIGTSTP, SIGTTIN, SIGTTOU, SIGCONT}) sigdelset(&set, number);
  return set;
}

GroupWitness::GroupWitness() {
  std::array<int, 2> ends{-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return;
  pid_ = fork();
  if (pid_ == 0) {
    close(ends[0]);
    bear_witness(ends[1]);
  }
  close(ends[1]);
  socket_ = ends[0];
}

GroupWitness::~GroupWitness() {
  if (socket_ >= 0) close(socket_);
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool GroupWitness::received(int signal) {
  constexpr int kTries = 10;
  constexpr useconds_t kBetween = 2'000;
  for (int i = 0; i < kTries && pid_ > 0; ++i) {
    if (ask(signal)) return true;
    usleep(kBetween);
  }
  return false;
}

bool GroupWitness::ask(int signal) {
  constexpr int kLongestMs = 1000;  // it may be stopped
  const auto number = static_cast<unsigned char>(signal);
  char answer = 0;
  pollfd waited{.fd = socket_, .events = POLLIN, .revents = 0};
  if (send(socket_, &number, 1, MSG_NOSIGNAL) == 1 && poll(&waited, 1, kLongestMs) == 1 &&
      recv(socket_, &answer, 1, 0) == 1) {
    return answer != 0;
  }
  close(socket_);  // a late answer would be taken for that to another question
  socket_ = -1;
  return false;
}

}  // namespace oomdiag
