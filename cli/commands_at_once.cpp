#include "cli/commands_at_once.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <thread>

namespace oomdiag {
namespace {

pid_t start(const LoggedCommand& command) {
  std::vector<char*> arguments;
  for (const std::string& argument : command.arguments) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const pid_t child = fork();
  if (child != 0) return child;
  const int log = open(command.log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(nothing, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execvp(arguments.front(), arguments.data());
  _exit(127);
}

}  // namespace

std::size_t run_at_once(const std::vector<LoggedCommand>& commands, const std::function<void(std::size_t)>& over) {
  const std::size_t places = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  std::map<pid_t, std::size_t> running;
  std::size_t next = 0, ended = 0, failed = commands.size();
  while (next < commands.size() || !running.empty()) {
    if (next < commands.size() && running.size() < places && failed == commands.size()) {
      const pid_t child = start(commands[next]);
      if (child < 0) failed = std::min(failed, next);
      if (child > 0) running.emplace(child, next);
      ++next;
      continue;
    }
    if (running.empty()) break;
    int status = 0;
    const pid_t child = wait(&status);
    if (child < 0) return running.begin()->second;
    const auto found = running.find(child);
    if (found == running.end()) continue;
    if (status != 0) failed = std::min(failed, found->second);
    running.erase(found);
    over(++ended);
  }
  return failed;
}

}  // namespace oomdiag
