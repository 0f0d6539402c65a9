#include "cli/process/workers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>

#include "cli/process/process_tree.h"
#include "cli/process/signals.h"
#include "profiler/error.h"
#include "profiler/host.h"

// Processes and no threads: a launcher of programs deals with signals and children of its whole process, so each has one
// process to itself. What it returns comes back in a file of no name.

namespace oomdiag {
namespace {

struct Worker {
  std::size_t work = 0;
  int answer = -1;  ///< file that it writes to
};

[[noreturn]] void do_work(const std::function<std::string()>& work, int answer, const BlockedSignals& signals) {
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

/// Where too little memory is left, an allocation of ours fails rather than one of another process, and if the kernel has to
/// end a process after all, it is this one.
void bound_memory() {
  constexpr rlim_t kLeast = rlim_t{64} << 20;
  std::ofstream("/proc/self/oom_score_adj") << 1000;
  rlimit limit{};
  const std::optional<int64_t> available = available_memory();
  if (!available || getrlimit(RLIMIT_DATA, &limit) != 0) return;
  const rlim_t bytes = std::max(kLeast, static_cast<rlim_t>(*available) / 4 * 3);
  limit.rlim_cur = std::min(limit.rlim_cur, bytes);
  setrlimit(RLIMIT_DATA, &limit);
}

std::pair<pid_t, Worker> start(const std::function<std::string()>& work, std::size_t index,
                               const BlockedSignals& signals) {
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

void kill_all(std::map<pid_t, Worker>& workers) {
  for (const auto& [pid, worker] : workers) {
    kill_processes(find_tree(pid));
    waitpid(pid, nullptr, 0);
    close(worker.answer);
  }
  workers.clear();
}

}  // namespace

void run_each_in_a_process(const std::vector<std::function<std::string()>>& works, int at_once,
                           const TakeAnswer& take) {
  std::map<pid_t, Worker> workers;
  const BlockedSignals signals(make_signals({SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD}));
  std::size_t begun = 0, over = 0;
  try {
    while (over < works.size()) {
      while (begun < works.size() && workers.size() < static_cast<std::size_t>(std::max(1, at_once))) {
        workers.insert(start(works[begun], begun, signals));
        ++begun;
      }
      siginfo_t info{};
      const int signal = signals.wait(std::chrono::milliseconds(50), info);
      if (signal > 0 && signal != SIGCHLD) throw Interrupted{signal};
      for (auto worker = workers.begin(); worker != workers.end();) {
        int status = 0;
        if (waitpid(worker->first, &status, WNOHANG) != worker->first) {
          ++worker;
          continue;
        }
        const Worker ended = worker->second;
        worker = workers.erase(worker);
        ++over;
        take(ended.work, take_answer(ended, status));
      }
    }
  } catch (...) {
    kill_all(workers);
    throw;
  }
}

std::vector<std::optional<std::string>> run_in_processes(const std::vector<std::function<std::string()>>& works,
                                                         int at_once, const std::function<void(std::size_t)>& on_done) {
  std::vector<std::optional<std::string>> answers(works.size());
  std::size_t over = 0;
  run_each_in_a_process(works, at_once, [&](std::size_t work, std::optional<std::string> answer) {
    answers[work] = std::move(answer);
    on_done(++over);
  });
  return answers;
}

int programs_at_once(int64_t bytes_of_one) {
  constexpr int64_t kUsualBytes = int64_t{2} << 30;  // of a Python program with torch on a virtual device
  const int cores = available_cores();
  const std::optional<int64_t> available = available_memory();
  if (!available) return cores;
  const int64_t bytes = bytes_of_one > 0 ? bytes_of_one : kUsualBytes;
  return static_cast<int>(std::clamp<int64_t>(*available / (bytes + bytes / 4), 1, cores));
}

std::optional<std::string> run_apart(const std::function<std::string()>& work) {
  const auto bounded = [&] {
    bound_memory();
    return work();
  };
  return run_in_processes({bounded}, 1, [](std::size_t) {}).front();
}

}  // namespace oomdiag
