#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "extension/virtual_device/driver/locks.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

template <LockRank kRank, typename Mutex = std::mutex>
using Checked = OrderedLock<kRank, Mutex, true>;

/// What a child of this process says on stderr when it runs `act`, and "aborted" before it if that is how it ended.
template <typename Act>
std::string run_in_child(Act act) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGABRT, SIG_DFL);  // not the test runner's business
    dup2(ends[1], STDERR_FILENO);
    act();
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char text[256];
  for (ssize_t count; (count = read(ends[0], text, sizeof text)) > 0;) said.append(text, static_cast<size_t>(count));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? "aborted: " : "") + said;
}

}  // namespace

TEST_CASE("locks in their order are taken in silence", "[virtual_device]") {
  CHECK(run_in_child([] {
          Checked<LockRank::streams, std::recursive_mutex> streams;
          Checked<LockRank::memory> memory;
          Checked<LockRank::contents> contents;
          for (int i = 0; i < 2; ++i) {
            const std::lock_guard first(streams);
            const std::lock_guard second(memory);
            const std::lock_guard third(contents);
          }
          const std::lock_guard last(contents);
        }) == "");
}

TEST_CASE("a lock out of order aborts and both are named", "[virtual_device]") {
  CHECK(run_in_child([] {
          Checked<LockRank::streams, std::recursive_mutex> streams;
          Checked<LockRank::memory> memory;
          const std::lock_guard first(memory);
          const std::lock_guard second(streams);
        }) == "aborted: oomdiag: locks out of order: streams is taken under memory (driver/locks.h)\n");
}

TEST_CASE("two locks of one rank are out of order, a recursive one taken twice is not", "[virtual_device]") {
  CHECK(run_in_child([] {
          Checked<LockRank::library> one, other;
          const std::lock_guard first(one);
          const std::lock_guard second(other);
        }) == "aborted: oomdiag: locks out of order: library is taken under library (driver/locks.h)\n");
  CHECK(run_in_child([] {
          Checked<LockRank::streams, std::recursive_mutex> streams;
          Checked<LockRank::memory> memory;
          const std::lock_guard first(streams);
          const std::lock_guard second(memory);
          const std::lock_guard again(streams);
        }) == "");
}

TEST_CASE("without checks a lock is its mutex", "[virtual_device]") {
  STATIC_REQUIRE(sizeof(OrderedLock<LockRank::memory, std::mutex, false>) == sizeof(std::mutex));
  CHECK(run_in_child([] {
          OrderedLock<LockRank::streams, std::mutex, false> streams;
          OrderedLock<LockRank::memory, std::mutex, false> memory;
          const std::lock_guard first(memory);
          const std::lock_guard second(streams);
        }) == "");
}
