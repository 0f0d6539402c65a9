#include <sys/stat.h>

#include <fstream>
#include <iterator>

#include "cli/reports/bundle.h"
#include "profiler/error.h"
#include "profiler/snapshot/packed.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;

namespace {

std::string read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

TEST_CASE("a bundle brings back what a run wrote, and nothing else", "[cli][bundle]") {
  const TestFolder base, other;
  const std::string trace = "events" + std::string(3 << 20, '\0') + "more";
  base.write("run/trace", trace);
  base.write("run/report.json", "{}");
  base.write("run/rank-1/trace", "of rank 1");
  base.write("run/notes", "somebody's");

  const auto bundle = base.write("run.bundle.tar.gz", make_bundle(base.path() / "run"));
  REQUIRE(is_bundle(bundle));
  CHECK(std::filesystem::file_size(bundle) < 10000);
  unpack_bundle(bundle, other.path());

  CHECK(read(other.path() / "trace") == trace);
  CHECK(read(other.path() / "report.json") == "{}");
  CHECK(read(other.path() / "rank-1" / "trace") == "of rank 1");
  CHECK_FALSE(std::filesystem::exists(other.path() / "notes"));
  struct stat unpacked {};
  REQUIRE(stat((other.path() / "trace").c_str(), &unpacked) == 0);
  CHECK(unpacked.st_blocks * 512 < 1 << 20);  // sparse again
}

TEST_CASE("a trace of hardly anything but zeros comes back", "[cli][bundle]") {
  const TestFolder base, other;
  base.write("run/trace", std::string(64 << 20, '\0'));
  const auto bundle = base.write("run.bundle.tar.gz", make_bundle(base.path() / "run"));
  CHECK(std::filesystem::file_size(bundle) * 1000 < 64 << 20);
  unpack_bundle(bundle, other.path());
  CHECK(std::filesystem::file_size(other.path() / "trace") == 64 << 20);
}

TEST_CASE("a bundle cannot write outside of its folder", "[cli][bundle]") {
  const TestFolder base;
  base.write("run/rank-1/trace", "of rank 1");
  const auto bundle = base.write("run.bundle.tar.gz", make_bundle(base.path() / "run"));
  REQUIRE(std::system(("gzip -dc " + bundle.string() + " > " + (base.path() / "tar").string()).c_str()) == 0);
  const std::string tar = read(base.path() / "tar");
  for (const std::string name : {"../up/trace", "/tmp/trace_of_bundle/trace", "a/b/trace"}) {
    std::string changed = tar;
    changed.replace(0, 100, name + std::string(100 - name.size(), '\0'));
    std::fill_n(changed.begin() + 148, 8, ' ');
    unsigned sum = 0;
    for (size_t i = 0; i < 512; ++i) sum += static_cast<unsigned char>(changed[i]);
    char digits[8];
    std::snprintf(digits, sizeof digits, "%06o", sum);
    changed.replace(148, 7, digits, 7);
    Packer packer;
    packer.add(changed);
    const auto file = base.write("changed.tar.gz", packer.finish());
    const TestFolder target;
    unpack_bundle(file, target.path() / "in");
    CHECK_FALSE(std::filesystem::exists(target.path() / "up"));
    CHECK_FALSE(std::filesystem::exists(target.path() / "in"));
  }
}

TEST_CASE("a damaged bundle is rejected", "[cli][bundle]") {
  const TestFolder base;
  base.write("run/trace", std::string(100000, 'x'));
  const std::string whole = make_bundle(base.path() / "run");
  const auto cut = base.write("cut.bundle.tar.gz", whole.substr(0, whole.size() - 40));
  CHECK_THROWS_AS(unpack_bundle(cut, base.path() / "out"), Error);
  CHECK_THROWS_AS(make_bundle(base.path() / "absent"), Error);
}
