#include <random>

#include "profiler/match.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

constexpr uint32_t no = kUnmatched;
using Keys = std::vector<uint64_t>;
using Matches = std::vector<uint32_t>;

}  // namespace

TEST_CASE("what both sequences have is matched in order", "[shape_function]") {
  CHECK(match(Keys{1, 2, 3}, Keys{1, 2, 3}) == Matches{0, 1, 2});
  CHECK(match(Keys{1, 2, 3}, Keys{1, 9, 2, 3, 8}) == Matches{0, 2, 3});
  CHECK(match(Keys{1, 9, 2, 3, 8}, Keys{1, 2, 3}) == Matches{0, no, 1, 2, no});
  CHECK(match(Keys{}, Keys{1}) == Matches{});
  CHECK(match(Keys{7}, Keys{}) == Matches{no});
  CHECK(match(Keys{4, 5}, Keys{6, 7}) == Matches{no, no});
}

TEST_CASE("a workspace at every second place leaves all others matched", "[shape_function]") {
  std::mt19937 random(7);
  Keys plain, with_workspaces;
  for (uint64_t i = 0; i < 2000; ++i) {
    plain.push_back(random() % 50);
    with_workspaces.push_back(plain.back());
    if (i % 2 == 0) with_workspaces.push_back(1000);
  }
  const Matches matches = match(plain, with_workspaces);
  for (uint32_t i = 0; i < matches.size(); ++i) CHECK(matches[i] == i + (i + 1) / 2);
  CHECK(match(plain, with_workspaces, 10).back() == no);
}

}  // namespace oomdiag
