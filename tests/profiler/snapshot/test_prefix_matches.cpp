#include <cstdint>
#include <random>

#include "profiler/snapshot/prefix_matches.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

/// The matches at all places of `row`, and how many comparisons they took.
struct Counted {
  std::vector<size_t> matches{};
  uint64_t comparisons = 0;
};

Counted match(const std::vector<int>& pattern, const std::vector<int>& row) {
  Counted counted;
  const auto equal = [&](int a, int b) {
    ++counted.comparisons;
    return a == b;
  };
  PrefixMatches<int, decltype(equal)> matches(pattern, equal);
  for (size_t place = 0; place < row.size(); ++place) counted.matches.push_back(matches.next(row, place));
  return counted;
}

std::vector<size_t> match_each(const std::vector<int>& pattern, const std::vector<int>& row) {
  std::vector<size_t> matches;
  for (size_t place = 0; place < row.size(); ++place) {
    size_t count = 0;
    while (count < pattern.size() && place + count < row.size() && pattern[count] == row[place + count]) ++count;
    matches.push_back(count);
  }
  return matches;
}

}  // namespace

TEST_CASE("matches of a prefix are those that comparing place by place finds", "[compare]") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const auto letters = [&](size_t size) {
      std::vector<int> row(random() % size);
      for (int& letter : row) letter = static_cast<int>(random() % 2);
      return row;
    };
    const std::vector<int> pattern = letters(20), row = letters(60);
    REQUIRE(match(pattern, row).matches == match_each(pattern, row));
  }
}

TEST_CASE("a row that repeats itself is compared about twice, not once for each place", "[compare]") {
  std::vector<int> pattern, row;
  for (int i = 0; i < 16'384; ++i) pattern.push_back(i % 2);
  for (int i = 0; i < 200'000; ++i) row.push_back(i % 2);
  CHECK(match(pattern, row).comparisons < 3 * (pattern.size() + row.size()));
}
