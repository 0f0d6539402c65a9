#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/launch/run_config.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "profiler/error.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

TEST_CASE("a run folder is named after the process and never takes an older run's place", "[cli]") {
  const TestFolder base;
  CHECK(make_run_folder(base.path(), 4711).filename() == "oomdiag-4711");
  CHECK(make_run_folder(base.path(), 4711).filename() == "oomdiag-4711-2");
  CHECK_THROWS_AS(make_run_folder(base.path() / "absent", 4711), Error);
}

TEST_CASE("a run folder is its owner's alone", "[cli]") {
  const TestFolder base;
  const auto rights = std::filesystem::status(make_run_folder(base.path(), 1)).permissions();
  CHECK(rights == std::filesystem::perms::owner_all);
}

TEST_CASE("what a run left says whether the recorder was there, and whether CUDA was used", "[cli]") {
  const TestFolder run;
  CHECK_FALSE(look_into(run.path()).was_loaded);
  run.write("loaded");
  CHECK(look_into(run.path()).was_loaded);
  CHECK_FALSE(look_into(run.path()).has_asked);
  CHECK_FALSE(look_into(run.path()).has_trace);
  run.write("trace");
  CHECK(look_into(run.path()).has_trace);
}

TEST_CASE("the folder of an empty run goes, one with anything else in it stays", "[cli]") {
  const TestFolder base;
  const auto run = base.write("run/loaded").parent_path();
  base.write("run/ranks/0123-mail");
  remove_empty_run(run);
  CHECK_FALSE(std::filesystem::exists(run));

  base.write("run/notes");
  remove_empty_run(run);
  CHECK(std::filesystem::exists(run / "notes"));
}

TEST_CASE("a requested folder is made", "[cli]") {
  const TestFolder base;
  CHECK(std::filesystem::is_directory(choose_base((base.path() / "runs" / "today").string())));
  CHECK_THROWS_AS(choose_base((base.write("file") / "runs").string()), Error);
}

TEST_CASE("git ignores runs that name no folder, and the last empty one takes their folder away", "[cli]") {
  const TestFolder here;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(here.path());
  const std::filesystem::path base = choose_base("");
  const std::filesystem::path one = make_run_folder(base, 1), two = make_run_folder(base, 2);
  CHECK(base.filename() == kRunsFolder);
  CHECK(std::filesystem::exists(base / ".gitignore"));
  CHECK(newest_run().parent_path() == kRunsFolder);
  remove_empty_run(one);
  CHECK(std::filesystem::exists(two));
  remove_empty_run(two);
  CHECK_FALSE(std::filesystem::exists(base));
  CHECK(newest_run().empty());
  std::filesystem::current_path(before);
}

TEST_CASE("what a program said last is cut between characters", "[cli]") {
  const TestFolder run;
  std::string line = "ValueError:";
  for (int i = 0; i < 300; ++i) line += "ä";
  const std::string last = last_line(run.write("output.txt", "first\n" + line + "\n  \n"));
  CHECK(last.starts_with("ValueError:ä"));
  CHECK(nlohmann::json(last).dump().size() > last.size());  // throws where a character was cut
}

TEST_CASE("what torchrun prints last is not what a program said, its rank's error is", "[cli]") {
  const TestFolder run;
  const std::string ranks =
      "[rank1]: Traceback (most recent call last):\n[rank1]: torch.AcceleratorError: CUDA error: invalid device "
      "ordinal\n"
      "[rank1]: GPU device may be out of range\n";
  const std::string torchrun =
      "Traceback (most recent call last):\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
      "ddp.py FAILED\n  traceback : To enable traceback see: https://pytorch.org\n=====\n";
  CHECK(last_line(run.write("output.txt", ranks + torchrun)) ==
        "[rank1]: torch.AcceleratorError: CUDA error: invalid device ordinal");
  CHECK(last_line(run.write("output.txt", "usage: it has no --batch\n=====\n")) == "usage: it has no --batch");
}

TEST_CASE("every file that oomdiag writes into a run folder is known as such", "[cli]") {
  for (const char* name : {"trace", "report.json", "report.json.part", "run.json", "run.json.part", "fix.json"}) {
    CHECK(is_run_file(name));
  }
  for (const char* name : {"notes", "fix", ".part", "trace.part.part"}) CHECK_FALSE(is_run_file(name));
}

TEST_CASE("how a run was started is its owner's business", "[cli]") {
  const TestFolder run;
  write_run_config({.program = {"python", "train.py", "--token=secret"}, .directory = "/home", .device = "real"},
                   run.path());
  const auto rights = std::filesystem::status(run.path() / "run.json").permissions();
  CHECK(rights == (std::filesystem::perms::owner_read | std::filesystem::perms::owner_write));
}

TEST_CASE("how a run was started is read again, of each of its ranks", "[cli]") {
  const TestFolder run;
  RunConfig config{.program = {"python", "train.py"}, .directory = "/home", .device = "h100.json", .batch = 8};
  write_run_config(config, run.path());
  CHECK(read_run_config(run.path()) == config);
  config.rank =
      SingleRank{.job = {.world_size = 64, .local_world_size = 8, .ranks = {5}, .topology = {.links = "nvlink,rdma"}},
                 .number = 5};
  write_run_config(config, run.path());
  CHECK(read_run_config(run.path()) == config);
  std::filesystem::create_directory(run.path() / "rank-9");
  CHECK(read_run_config(run.path() / "rank-9").rank->number == 9);
  CHECK_THROWS_AS(read_run_config(run.path() / "other"), Error);
}

TEST_CASE("a report that another process made is the one that it made", "[cli]") {
  const Report report{.outcome = "failed", .exit_code = 3, .folder = "oomdiag 4711", .steps = 7};
  CHECK(unpack(pack(report)) == report);
  CHECK(unpack(pack({})) == Report{});
}

TEST_CASE("what is written takes the place of a file, and goes into a pipe", "[cli]") {
  const TestFolder folder;
  const auto file = folder.write("report.json", "old and longer");
  write_whole("new", file);
  std::string text;
  std::getline(std::ifstream(file), text);
  CHECK(text == "new");

  const std::filesystem::path pipe = folder.path() / "pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  write_whole("new", pipe);
  std::array<char, 8> read_from{};
  CHECK(read(reader, read_from.data(), read_from.size()) == 3);
  close(reader);
  CHECK(std::filesystem::is_fifo(pipe));
  CHECK_FALSE(std::filesystem::exists(folder.path() / "pipe.part"));
}
