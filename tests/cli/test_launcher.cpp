#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>

#include "cli/alive.h"
#include "cli/launcher.h"
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

TEST_CASE("a process that has a file mapped is told from one that has not", "[cli]") {
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
