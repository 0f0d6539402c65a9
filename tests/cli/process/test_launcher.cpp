#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "cli/process/kept_input.h"
#include "cli/process/launcher.h"
#include "cli/reports/alive.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

Ending run(const std::string& script, const std::filesystem::path& folder = "/tmp", bool keeps_output = false) {
  return launch({.arguments = {"sh", "-c", script}, .environment = {}, .keeps_output = keeps_output},
                [&](pid_t) { return folder; });
}

}  // namespace

TEST_CASE("who was interrupted is known, however well the program took it", "[cli]") {
  CHECK(run("exit 0") == Ending{});
  CHECK(run("trap '' INT; kill -INT $PPID; exit 0") == Ending{.interrupted_by = SIGINT});
  CHECK(run("trap 'exit 4' TERM; kill -TERM $PPID; while :; do sleep 0.01; done") ==
        Ending{.exit_code = 4, .interrupted_by = SIGTERM});
  CHECK(run("kill -KILL $$") == Ending{.signal = SIGKILL});
}

TEST_CASE("whatever signal another process sends is passed on", "[cli]") {
  for (const int number : {SIGALRM, SIGXCPU, SIGVTALRM, SIGPROF, SIGPWR, SIGIO, SIGABRT, SIGUSR1, SIGUSR2, SIGRTMIN}) {
    const std::string send = "kill -" + std::to_string(number) + " $PPID; exec sleep 20";
    CHECK(run(send) == Ending{.signal = number});
  }
}

TEST_CASE("a signal for the whole process group reaches the program once", "[cli]") {
  const auto count = [](const char* target) {
    const pid_t group = fork();
    if (group == 0) {
      setpgid(0, 0);
      const std::string script = "trap 'count=$((count+1))' USR1; count=0; kill -USR1 " + std::string(target) +
                                 "; for i in 1 2 3 4 5; do sleep 0.1; done; exit $count";
      _exit(run(script).exit_code);
    }
    int status = 0;
    waitpid(group, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  CHECK(count("0") == 1);
  CHECK(count("$PPID") == 1);
}

TEST_CASE("who kills the launcher kills the program", "[cli]") {
  const TestFolder folder;
  const std::filesystem::path file = folder.path() / "pid";
  const pid_t launcher = fork();
  if (launcher == 0) {
    run("echo $$ > " + file.string() + "; exec sleep 60");
    _exit(0);
  }
  pid_t program = 0;
  for (int i = 0; i < 500 && program == 0; ++i) {
    usleep(10'000);
    std::ifstream(file) >> program;
  }
  REQUIRE(program > 0);
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  bool is_alive = true;
  for (int i = 0; i < 500 && is_alive; ++i) {
    usleep(10'000);
    std::string command;  // one that has ended and that nobody waited for has none
    is_alive = static_cast<bool>(std::ifstream("/proc/" + std::to_string(program) + "/cmdline") >> command);
  }
  CHECK_FALSE(is_alive);
}

TEST_CASE("a program that is ended leaves nothing running of what it started", "[cli]") {
  const TestFolder folder;
  const std::string pids = (folder.path() / "pids").string();
  for (const char* shell :
       {"trap '' TERM; ", ""}) {  // one that has to be made to end, and one that ends and leaves a child
    std::filesystem::remove(pids);
    const std::string script = std::string(shell) + "(trap '' TERM; exec sleep 60) & echo $! > " + pids + "; wait";
    const auto has_started = [&] { return std::filesystem::exists(pids) && std::filesystem::file_size(pids) > 0; };
    launch(
        {.arguments = {"sh", "-c", script}, .environment = {}}, [&](pid_t) { return folder.path(); },
        Tick{.every = std::chrono::milliseconds(50), .work = [] {}, .is_enough = has_started});
    pid_t child = 0;
    std::ifstream(pids) >> child;
    REQUIRE(child > 0);
    const auto is_alive = [&] {  // one that has ended and that nobody waited for has no command line any more
      std::string command;
      return static_cast<bool>(std::ifstream("/proc/" + std::to_string(child) + "/cmdline") >> command);
    };
    for (int i = 0; i < 100 && is_alive(); ++i) usleep(10'000);
    CHECK_FALSE(is_alive());
  }
}

TEST_CASE("what a shell says of a program that cannot be run is the exit code", "[cli]") {
  const TestFolder folder;
  CHECK(NotStarted("absent", ENOENT).exit_code() == 127);
  CHECK(NotStarted("locked", EACCES).exit_code() == 126);
  CHECK(NotStarted("./data", EACCES).hint() == "is it executable? chmod +x ./data");
}

TEST_CASE("the output of a program is its owner's, and never goes where a link leads", "[cli]") {
  const TestFolder folder;
  CHECK(run("echo hello", folder.path(), true) == Ending{});
  struct stat info {};
  REQUIRE(stat((folder.path() / "output.txt").c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);

  const TestFolder trap;
  const auto victim = trap.write("victim", "keep me");
  std::filesystem::create_symlink(victim, trap.path() / "output.txt");
  run("true", trap.path(), true);
  std::string text;
  std::ifstream(victim) >> text;
  CHECK(text == "keep");
}

TEST_CASE("a process that has a file mapped is distinguished from one that has not", "[cli]") {
  const TestFolder folder;
  const auto file = folder.write("trace", "some bytes");
  CHECK_FALSE(has_mapped(getpid(), file));
  std::FILE* const open_file = std::fopen(file.c_str(), "r");
  void* const map = mmap(nullptr, 10, PROT_READ, MAP_SHARED, fileno(open_file), 0);
  std::fclose(open_file);
  REQUIRE(map != MAP_FAILED);
  CHECK(has_mapped(getpid(), file));
  CHECK_FALSE(has_mapped(getpid(), folder.write("other")));
  CHECK_FALSE(has_mapped(0, file));
  munmap(map, 10);
}

TEST_CASE("what stdin has is given to each of many runs", "[cli]") {
  const TestFolder folder;
  int ends[2]{};
  REQUIRE(pipe(ends) == 0);
  REQUIRE(write(ends[1], "one\ntwo\n", 8) == 8);
  close(ends[1]);
  const auto file = folder.path() / "stdin";
  CHECK(keep_input(ends[0], file).bytes == 8);
  close(ends[0]);
  for (int i = 0; i < 2; ++i) {
    const Ending ending = launch({.arguments = {"sh", "-c", "exit $(grep -c .)"}, .environment = {}, .input = file},
                                 [&](pid_t) { return folder.path(); });
    CHECK(ending == Ending{.exit_code = 2});
  }
}

TEST_CASE("a pipe that stays open and empty is no input, and a file is left where it stands", "[cli]") {
  const TestFolder folder;
  int ends[2]{};
  REQUIRE(pipe(ends) == 0);
  CHECK(keep_input(ends[0], folder.path() / "stdin").bytes == 0);
  CHECK_FALSE(std::filesystem::exists(folder.path() / "stdin"));
  REQUIRE(write(ends[1], "one", 3) == 3);
  const KeptInput open_still = keep_input(ends[0], folder.path() / "stdin");
  CHECK((open_still.bytes == 3 && !open_still.is_whole));
  close(ends[0]);
  close(ends[1]);
  const int file = open(folder.write("lines", "one\ntwo\n").c_str(), O_RDONLY);
  lseek(file, 4, SEEK_SET);
  CHECK(keep_input(file, folder.path() / "rest").bytes == 4);
  CHECK(lseek(file, 0, SEEK_CUR) == 4);
  close(file);
}
