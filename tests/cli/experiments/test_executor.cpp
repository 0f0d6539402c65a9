#include <unistd.h>

#include <csignal>
#include <fstream>
#include <string>

#include "cli/experiments/executor.h"
#include "cli/experiments/forking_python.h"
#include "cli/process/workers.h"
#include "profiler/error.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

/// A shell script as a program; it needs no device and no recorder.
DiagnosisRequest shell(const TestFolder& folder, const std::string& script) {
  return {
      .program = {"sh", "-c", script}, .device = {.device = RealGpu{}}, .base = folder.path(), .keeps_output = true};
}

}  // namespace

TEST_CASE("programs end as they do alone, in the order in which they were asked for", "[cli]") {
  const TestFolder folder;
  const Install install;
  Executor executor(install);
  std::size_t reported = 0;
  const auto results = executor.run({shell(folder, "sleep 0.1; exit 3"), shell(folder, "exit 0")},
                                    [&](std::size_t over) { reported = over; });
  REQUIRE(results.size() == 2);
  CHECK(results[0].exit_code == 3);
  CHECK(results[1].exit_code == 0);
  CHECK_FALSE(results[1].has_report());
  CHECK(std::filesystem::exists(results[0].folder / "output.txt"));
  CHECK(reported == 2);
  CHECK(executor.count() == 2);
}

TEST_CASE("a run is found in a folder whose name is no UTF-8", "[cli]") {
  const TestFolder folder;
  const Install install;
  Executor executor(install);
  DiagnosisRequest request = shell(folder, "exit 0");
  request.base = folder.write("\xe9/file").parent_path();
  const auto results = executor.run({request}, [](std::size_t) {});
  CHECK(std::filesystem::exists(results[0].folder / "output.txt"));
}

TEST_CASE("a program that is aborted at its exit is run once more, and of the first time nothing is left", "[cli]") {
  const TestFolder folder;
  const Install install;
  Executor executor(install);
  const std::string once = "if mkdir " + (folder.path() / "seen").string() + " 2>/dev/null; then exit 134; fi; exit 0";
  const auto results = executor.run({shell(folder, once), shell(folder, "exit 134")}, [](std::size_t) {});
  CHECK(results[0].exit_code == 0);
  CHECK(results[1].exit_code == 134);
  CHECK(executor.count() == 4);
  std::size_t runs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    runs += entry.path().filename().string().starts_with("oomdiag-") ? 1 : 0;
  }
  CHECK(runs == 2);
}

TEST_CASE("what was over when somebody interrupted is known", "[cli]") {
  const TestFolder folder;
  const Install install;
  Executor executor(install);
  const auto interrupt = [](std::size_t) { kill(getpid(), SIGTERM); };
  CHECK_THROWS_AS(executor.run({shell(folder, "exit 3"), shell(folder, "sleep 60")}, interrupt), Interrupted);
  REQUIRE(executor.finished().size() == 2);
  REQUIRE(executor.finished()[0]);
  CHECK(executor.finished()[0]->exit_code == 3);
  CHECK_FALSE(executor.finished()[1]);
}

TEST_CASE("a program that is not there is an error", "[cli]") {
  const TestFolder folder;
  const Install install;
  Executor executor(install);
  DiagnosisRequest request = shell(folder, "");
  request.program = {"no-such-program"};
  CHECK_THROWS_AS(executor.run({request}, [](std::size_t) {}), Error);
}

TEST_CASE("a Python script is forked by what its imports depend on: the interpreter, its options, the script",
          "[cli]") {
  const TestFolder folder;
  const std::string script = (folder.path() / "train.py").string();
  std::ofstream(script) << "import json\n";
  using Words = std::vector<std::string>;
  CHECK(python_and_script({"/usr/bin/python3.11", "-u", script, "--batch", "8"}) ==
        Words{"/usr/bin/python3.11", "-u", script});
  CHECK(python_and_script({"python", script}) == Words{"python", script});
  CHECK_FALSE(python_and_script({"python", "-m", "train"}));
  CHECK_FALSE(python_and_script({"python", "-X", "dev", script}));
  CHECK_FALSE(python_and_script({"pythonic", script}));
  CHECK_FALSE(python_and_script({"torchrun", script}));
  CHECK_FALSE(python_and_script({"python", (folder.path() / "missing.py").string()}));
  CHECK_FALSE(python_and_script({}));
}
