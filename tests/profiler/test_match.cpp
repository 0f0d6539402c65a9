#include <algorithm>
#include <array>
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

TEST_CASE("sequences that differ nearly everywhere are matched by a longest common subsequence", "[match]") {
  std::mt19937 random(11);
  for (const auto [left_size, right_size, values] :
       {std::array<size_t, 3>{3000, 2500, 40}, {40, 5000, 3}, {4000, 130, 9}}) {
    Keys left, right;
    while (left.size() < left_size) left.push_back(random() % values);
    while (right.size() < right_size) right.push_back(random() % values);

    std::vector<std::vector<size_t>> longest(left.size() + 1, std::vector<size_t>(right.size() + 1));
    for (size_t i = 1; i <= left.size(); ++i) {
      for (size_t j = 1; j <= right.size(); ++j) {
        longest[i][j] =
            left[i - 1] == right[j - 1] ? longest[i - 1][j - 1] + 1 : std::max(longest[i - 1][j], longest[i][j - 1]);
      }
    }

    size_t matched = 0;
    int64_t last = -1;
    const Matches matches = match_whole(left, right);
    for (size_t i = 0; i < left.size(); ++i) {
      if (matches[i] == no) continue;
      REQUIRE(left[i] == right[matches[i]]);
      REQUIRE(static_cast<int64_t>(matches[i]) > last);
      last = matches[i];
      ++matched;
    }
    CHECK(matched == longest.back().back());
  }
}

}  // namespace oomdiag
