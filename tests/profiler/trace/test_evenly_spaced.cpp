#include "profiler/trace/evenly_spaced.h"
#include "tests/catch.h"

namespace oomdiag {

TEST_CASE("a row that is not too long is kept whole", "[trace]") {
  EvenlySpaced<int> row(4);
  for (int i = 0; i < 4; ++i) *row.next() = i;

  CHECK(row.entries() == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("of a long row the first entry stays, and the others are evenly spaced and never too many", "[trace]") {
  EvenlySpaced<int> row(8);
  for (int i = 0; i < 1000; ++i) {
    if (int* place = row.next()) *place = i;
    const std::vector<int>& entries = row.entries();
    REQUIRE(entries.size() <= 8);
    REQUIRE(entries.front() == 0);
    const int stride = entries.size() == 1 ? 1 : entries[1];
    REQUIRE(entries.back() > i - stride);
    for (size_t k = 0; k < entries.size(); ++k) REQUIRE(entries[k] == static_cast<int>(k) * stride);
  }
  CHECK(row.entries().size() >= 4);
}

TEST_CASE("every second of an odd number keeps the first and the last", "[trace]") {
  std::vector<int> entries{1, 2, 3, 4, 5};
  entries.resize(keep_every_second(std::span(entries)));

  CHECK(entries == std::vector<int>{1, 3, 5});
}

}  // namespace oomdiag
