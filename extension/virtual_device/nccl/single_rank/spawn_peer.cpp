#include "extension/virtual_device/nccl/single_rank/spawn_peer.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "extension/environment.h"
#include "extension/virtual_device/nccl/single_rank/job.h"

namespace oomdiag {
namespace {

/// The strings of a file of /proc that ends each with a zero.
std::vector<std::string> read_strings(const char* file) {
  std::ifstream stream(file, std::ios::binary);
  std::vector<std::string> strings;
  for (std::string one; std::getline(stream, one, '\0');) strings.push_back(one);
  return strings;
}

void set(std::vector<std::string>& environment, const std::string& name, const std::string& value) {
  std::erase_if(environment, [&](const std::string& entry) { return entry.starts_with(name + "="); });
  if (!value.empty()) environment.push_back(name + "=" + value);
}

/// That of the beginning: what the program changed since, the other rank changes itself. It is not recorded.
std::vector<std::string> environment_of(int rank) {
  std::vector<std::string> environment = read_strings("/proc/self/environ");
  const auto local = std::max(1, static_cast<int>(variables::number("LOCAL_WORLD_SIZE", 1)));
  const std::string whole = std::to_string(rank);
  set(environment, "RANK", whole);
  set(environment, "ROLE_RANK", whole);
  set(environment, "LOCAL_RANK", std::to_string(rank % local));
  set(environment, "GROUP_RANK", std::to_string(rank / local));
  set(environment, variables::kRecorder, "");
  set(environment, variables::kOutput, "");
  set(environment, variables::kRankSummoned, "1");
  const char* owner = variables::text(variables::kRankOwner);
  set(environment, variables::kRankOwner, *owner ? owner : std::to_string(getpid()));
  return environment;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& one : strings) result.push_back(one.data());
  result.push_back(nullptr);
  return result;
}

/// In the child: no memory is taken, as another thread may have held the lock of malloc.
[[noreturn]] void become(char* const* arguments, char* const* environment, const char* output, const char* folder) {
  const int nothing = open("/dev/null", O_RDONLY);
  const int file = open(output, O_WRONLY | O_CREAT | O_APPEND, 0600);
  dup2(nothing, STDIN_FILENO);
  dup2(file, STDOUT_FILENO);
  dup2(file, STDERR_FILENO);
  if (*folder != '\0' && chdir(folder) != 0) _exit(127);
  execvpe(arguments[0], arguments, environment);
  _exit(127);
}

/// Starts the rank, whose process id comes into its file. Another process that has begun to start it is as good.
bool start_rank(int rank) {
  const int file = open(rank_file(rank).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return errno == EEXIST;
  std::vector<std::string> command = read_strings("/proc/self/cmdline");
  std::vector<std::string> environment = environment_of(rank);
  const std::string output = output_file(rank);
  const auto arguments = pointers(command);
  const auto variables = pointers(environment);
  const char* folder = variables::text(variables::kRankFolder);
  const pid_t child = command.empty() ? -1 : fork();
  if (child == 0) become(arguments.data(), variables.data(), output.c_str(), folder);
  const std::string pid = std::to_string(child);
  const bool is_written = child > 0 && write(file, pid.data(), pid.size()) == static_cast<ssize_t>(pid.size());
  close(file);
  if (child > 0) {
    std::fprintf(stderr, "oomdiag: rank %d needs what only rank %d makes: rank %d runs as well, unrecorded\n",
                 static_cast<int>(variables::number("RANK", 0)), rank, rank);
  }
  return is_written;
}

}  // namespace

bool spawn_peer(int rank) { return process_of(rank) != 0 || start_rank(rank); }

}  // namespace oomdiag
