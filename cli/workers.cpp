#include "cli/workers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "profiler/error.h"

// Processes and no threads: a launcher of programs deals with signals and children of its whole process, so each has one
// process to itself. What it returns comes back in a file of no name.

namespace oomdiag {
namespace {

/// While it lives, what would end us waits to be asked for.
class WaitingEnd {
 public:
  WaitingEnd() {
    sigemptyset(&set_);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD}) sigaddset(&set_, number);
    sigprocmask(SIG_BLOCK, &set_, &before_);
  }
  ~WaitingEnd() { restore(); }
  WaitingEnd(const WaitingEnd&) = delete;
  WaitingEnd& operator=(const WaitingEnd&) = delete;

  void restore() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  /// The signal that came in this time, or 0.
  int wait() const {
    const timespec limit{.tv_sec = 0, .tv_nsec = 50'000'000};
    const int signal = sigtimedwait(&set_, nullptr, &limit);
    return signal == SIGCHLD || signal < 0 ? 0 : signal;
  }

 private:
  sigset_t set_{}, before_{};
};

struct Worker {
  std::size_t work = 0;
  int answer = -1;  ///< file that it writes to
};

[[noreturn]] void do_work(const std::function<std::string()>& work, int answer, const WaitingEnd& signals) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  signals.restore();
  const int nothing = open("/dev/null", O_RDONLY);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  try {
    const std::string text = work();
    if (write(answer, text.data(), text.size()) != static_cast<ssize_t>(text.size())) _exit(1);
    _exit(0);
  } catch (...) {
    _exit(1);
  }
}

std::pair<pid_t, Worker> start(const std::function<std::string()>& work, std::size_t index, const WaitingEnd& signals) {
  const int answer = memfd_create("oomdiag answer", MFD_CLOEXEC);
  const pid_t child = answer < 0 ? -1 : fork();
  if (child == 0) do_work(work, answer, signals);
  if (child < 0) throw Error(ErrorKind::environment, fmt::format("cannot start a process: {}", std::strerror(errno)));
  return {child, {.work = index, .answer = answer}};
}

std::optional<std::string> take_answer(const Worker& worker, int status) {
  std::optional<std::string> text;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    text.emplace();
    lseek(worker.answer, 0, SEEK_SET);
    std::array<char, 4096> buffer{};
    for (ssize_t count = 0; (count = read(worker.answer, buffer.data(), buffer.size())) > 0;) {
      text->append(buffer.data(), static_cast<std::size_t>(count));
    }
  }
  close(worker.answer);
  return text;
}

/// The parent of each process.
std::multimap<pid_t, pid_t> children_by_parent() {
  std::multimap<pid_t, pid_t> children;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    pid_t pid = 0, parent = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc{}) continue;
    std::string stat;
    std::getline(std::ifstream(entry.path() / "stat"), stat);
    const std::size_t after_name = stat.rfind(')');  // "4711 (name) S parent ..."
    if (after_name == stat.npos || after_name + 4 >= stat.size()) continue;
    std::from_chars(stat.data() + after_name + 4, stat.data() + stat.size(), parent);
    children.emplace(parent, pid);
  }
  return children;
}

void kill_tree(pid_t root, const std::multimap<pid_t, pid_t>& children) {
  kill(root, SIGKILL);
  const auto [first, last] = children.equal_range(root);
  for (auto child = first; child != last; ++child) kill_tree(child->second, children);
}

void kill_all(std::map<pid_t, Worker>& workers) {
  const auto children = children_by_parent();
  for (const auto& [pid, worker] : workers) {
    kill_tree(pid, children);
    waitpid(pid, nullptr, 0);
    close(worker.answer);
  }
  workers.clear();
}

}  // namespace

std::vector<std::optional<std::string>> run_in_processes(const std::vector<std::function<std::string()>>& works,
                                                         int at_once, const std::function<void(std::size_t)>& tell) {
  std::vector<std::optional<std::string>> answers(works.size());
  std::map<pid_t, Worker> workers;
  const WaitingEnd signals;
  std::size_t begun = 0, over = 0;
  try {
    while (over < works.size()) {
      while (begun < works.size() && workers.size() < static_cast<std::size_t>(std::max(1, at_once))) {
        workers.insert(start(works[begun], begun, signals));
        ++begun;
      }
      if (const int signal = signals.wait(); signal != 0) throw Interrupted{signal};
      for (auto worker = workers.begin(); worker != workers.end();) {
        int status = 0;
        if (waitpid(worker->first, &status, WNOHANG) != worker->first) {
          ++worker;
          continue;
        }
        answers[worker->second.work] = take_answer(worker->second, status);
        worker = workers.erase(worker);
        tell(++over);
      }
    }
  } catch (...) {
    kill_all(workers);
    throw;
  }
  return answers;
}

int programs_at_once(long bytes_of_one) {
  const auto cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (bytes_of_one <= 0) return cores;
  std::ifstream file("/proc/meminfo");
  for (std::string name, unit; file >> name;) {
    long kibibytes = 0;
    file >> kibibytes;
    std::getline(file, unit);
    if (name == "MemAvailable:") {
      return static_cast<int>(std::clamp<long>(kibibytes * 1024 / (bytes_of_one + bytes_of_one / 4), 1, cores));
    }
  }
  return cores;
}

}  // namespace oomdiag
