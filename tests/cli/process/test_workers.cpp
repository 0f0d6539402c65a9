#include <sys/resource.h>

#include <csignal>
#include <vector>

#include "cli/process/own_process.h"
#include "cli/process/workers.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("answers come in the order of the works, and of one that died none", "[cli]") {
  std::size_t reported = 0;
  const auto answers = run_in_processes({[] { return std::string("a"); },
                                         []() -> std::string {
                                           raise(SIGKILL);
                                           return "b";
                                         },
                                         [] { return std::string("c"); }},
                                        2, [&](std::size_t over) { reported = over; });
  CHECK(answers == std::vector<std::optional<std::string>>{"a", std::nullopt, "c"});
  CHECK(reported == 3);
}

TEST_CASE("a work that is run apart comes to no harm but its own", "[cli]") {
  CHECK(run_apart([] { return std::string("done"); }) == "done");
  CHECK_FALSE(run_apart([]() -> std::string { throw std::bad_alloc(); }));
  CHECK_FALSE(run_apart([]() -> std::string {
    raise(SIGKILL);
    return {};
  }));
}

TEST_CASE("works end also where our parent ignored that children do", "[cli]") {
  const auto answer = run_apart([] {
    std::signal(SIGCHLD, SIG_IGN);  // as it is inherited
    keep_ended_children();
    return run_apart([] { return std::string("done"); }).value_or("nothing");
  });
  CHECK(answer == "done");
}

TEST_CASE("a work that is run apart may not take more memory than the host has left", "[cli]") {
  rlimit ours{};
  getrlimit(RLIMIT_DATA, &ours);
  const auto theirs = run_apart([] {
    rlimit limit{};
    getrlimit(RLIMIT_DATA, &limit);
    return std::to_string(limit.rlim_cur);
  });
  REQUIRE(theirs);
  CHECK(std::stoull(*theirs) < (1ULL << 48));
  rlimit after{};
  getrlimit(RLIMIT_DATA, &after);
  CHECK(after.rlim_cur == ours.rlim_cur);
}

TEST_CASE("at least one program runs, and no more than memory allows", "[cli]") {
  CHECK(programs_at_once(int64_t{1} << 60) == 1);
  CHECK(programs_at_once(0) >= 1);
}
