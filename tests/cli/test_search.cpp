#include <algorithm>
#include <vector>

#include "cli/search.h"
#include "tests/catch.h"

namespace oomdiag {

TEST_CASE("the smallest value that passes is found to the step", "[cli]") {
  const auto from_1234 = [](int64_t value) { return value >= 1234; };
  CHECK(find_smallest(100, 5000, 1, from_1234) == 1234);
  CHECK(find_smallest(100, 5000, 10, from_1234) == 1240);
  CHECK(find_smallest(1232, 1234, 2, from_1234) == 1234);
}

TEST_CASE("the largest value that passes is found, small ones first", "[cli]") {
  std::vector<int64_t> tried;
  const auto up_to_1000 = [&](int64_t value) {
    tried.push_back(value);
    return value <= 1000;
  };
  CHECK(find_largest(1, 65536, up_to_1000) == 1000);
  CHECK(tried.front() == 1);
  CHECK(*std::max_element(tried.begin(), tried.end()) == 1024);
  CHECK(tried.size() <= 22);
}

TEST_CASE("at the ends of a range the search ends", "[cli]") {
  CHECK(find_largest(3, 20, [](int64_t) { return true; }) == 20);
  CHECK(find_largest(3, 20, [](int64_t value) { return value <= 3; }) == 3);
  CHECK_FALSE(find_largest(3, 20, [](int64_t) { return false; }));
  CHECK(find_largest(7, 7, [](int64_t) { return true; }) == 7);
}

}  // namespace oomdiag
