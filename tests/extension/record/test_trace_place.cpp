#include <cstdlib>

#include "extension/record/trace_place.h"
#include "extension/write_status.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;
namespace fs = std::filesystem;

namespace {

constexpr TraceBudget kSmallTrace{.event_bytes = 128 << 10, .slots_per_device = 64};

/// This process is rank 0 of two for as long as this lives.
struct AsRank {
  AsRank() { setenv("RANK", "0", 1), setenv("WORLD_SIZE", "2", 1); }
  ~AsRank() { unsetenv("RANK"), unsetenv("WORLD_SIZE"); }
};

}  // namespace

TEST_CASE("a rank's trace goes to its own folder, which nobody else may look into", "[record]") {
  const TestFolder run;
  const AsRank rank;
  const PlacedTrace placed = place_trace(run.path(), 1, kSmallTrace);
  CHECK(placed.file == run.path() / "rank-0" / "trace");
  CHECK((fs::status(run.path() / "rank-0").permissions() & fs::perms::mask) == fs::perms::owner_all);
}

TEST_CASE("a folder that is planted under a rank's name gets no trace", "[record]") {
  const TestFolder run, elsewhere;
  const AsRank rank;
  fs::create_directory_symlink(elsewhere.path(), run.path() / "rank-0");
  const PlacedTrace placed = place_trace(run.path(), 1, kSmallTrace);
  CHECK(placed.file.parent_path().filename().string().starts_with("rank-0-"));
  CHECK(fs::is_empty(elsewhere.path()));
}

TEST_CASE("a run folder without a name gets no file, not even at the root", "[record]") {
  setenv(variables::kOutput, "", 1);
  CHECK_FALSE(write_status("a reason"));
  unsetenv(variables::kOutput);
  CHECK_FALSE(write_status("a reason"));
}
