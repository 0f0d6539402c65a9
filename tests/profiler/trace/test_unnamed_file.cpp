#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "profiler/error.h"
#include "profiler/trace/unnamed_file.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

std::string content_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

TEST_CASE("an unnamed file is in its folder and has no name there", "[trace]") {
  const TestFolder folder;
  UnnamedFile file(folder.path());
  file.write(2, "cd", 2);
  file.write(0, "ab", 2);
  CHECK(content_of(file.path()) == "abcd");
  CHECK(std::filesystem::is_empty(folder.path()));
  struct stat info {};
  REQUIRE(stat(file.path().c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);

  const int named = open_and_unlink(folder.path());  // where O_TMPFILE is not known
  REQUIRE(fstat(named, &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  CHECK(std::filesystem::is_empty(folder.path()));
  close(named);
  CHECK_THROWS_AS(UnnamedFile(folder.path() / "absent"), Error);
}
