#include "cli/process/forked_program.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

#include "cli/process/own_process.h"
#include "cli/process/signals.h"

namespace oomdiag {
namespace {

using UseAddress = int (*)(int socket, const sockaddr* address, socklen_t size);

/// A Unix socket for which `use` (bind or connect) took this path; -1 where it did not.
int open_socket(const std::string& path, UseAddress use) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return -1;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int opened = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (opened < 0) return -1;
  if (use(opened, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return opened;
  close(opened);
  return -1;
}

/// The number of arguments, they, and the environment, each ended by a NUL; behind the length of all that.
std::string pack_request(const std::vector<std::string>& arguments) {
  std::string body = std::to_string(arguments.size()) + '\0';
  for (const std::string& argument : arguments) body.append(argument).push_back('\0');
  for (char** variable = environ; *variable != nullptr; ++variable) body.append(*variable).push_back('\0');
  const auto size = static_cast<uint32_t>(body.size());
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + body;
}

bool send_all(int connection, std::string_view data) {
  while (!data.empty()) {
    const ssize_t count = send(connection, data.data(), data.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    data.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

/// One byte, with our standard streams beside it.
bool send_streams(int connection) {
  constexpr std::array<int, 3> kStreams{STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof kStreams)> control{};
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof kStreams);
  std::memcpy(CMSG_DATA(header), kStreams.data(), sizeof kStreams);
  return sendmsg(connection, &message, MSG_NOSIGNAL) == 1;
}

[[noreturn]] void end_as(int status) {
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  end_by(WTERMSIG(status));
  _exit(128 + WTERMSIG(status));
}

/// Ctrl-C reaches the program from the terminal itself.
void pass_on(int signals, int connection) {
  signalfd_siginfo info{};
  if (read(signals, &info, sizeof info) != sizeof info) return;
  if (info.ssi_code > 0) return;
  const char number = static_cast<char>(info.ssi_signo);
  send_all(connection, {&number, 1});
}

/// Until it has ended.
[[noreturn]] void stand_for_program(int connection, int signals) {
  for (;;) {
    std::array<pollfd, 2> waited{
        {{.fd = connection, .events = POLLIN, .revents = 0}, {.fd = signals, .events = POLLIN, .revents = 0}}};
    if (poll(waited.data(), waited.size(), -1) < 0 && errno != EINTR) end_as(SIGKILL);
    if ((waited[1].revents & POLLIN) != 0) pass_on(signals, connection);
    if (waited[0].revents == 0) continue;
    int status = 0;
    const bool is_known = recv(connection, &status, sizeof status, MSG_WAITALL) == sizeof status;
    end_as(is_known ? status : SIGKILL);  // the kernel killed the keeper
  }
}

}  // namespace

int listen_for_programs(const std::string& socket) {
  constexpr int kMaxWaiting = 64;
  const int listener = open_socket(socket, bind);
  if (listener < 0 || listen(listener, kMaxWaiting) == 0) return listener;
  close(listener);
  return -1;
}

void become_by_fork(const std::string& socket, const std::vector<std::string>& arguments,
                    const std::function<void()>& on_start) {
  const int connection = open_socket(socket, connect);
  if (connection < 0) return;
  const BlockedSignals ours(passed_signals());
  const int signals = signalfd(-1, &ours.set(), SFD_CLOEXEC);
  char begun = 0;
  const bool is_forked = signals >= 0 && send_streams(connection) && send_all(connection, pack_request(arguments)) &&
                         recv(connection, &begun, 1, 0) == 1;
  if (is_forked) {
    on_start();
    stand_for_program(connection, signals);
  }
  close(connection);
  if (signals >= 0) close(signals);
}

}  // namespace oomdiag
