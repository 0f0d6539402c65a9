#include <map>
#include <random>

#include "extension/cupti/fixed_map.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("a fixed map holds what a map holds, whatever comes and goes", "[cupti]") {
  FixedMap<int> fixed;
  std::map<uint64_t, int> plain;
  std::mt19937_64 random(7);
  for (int i = 0; i < 200'000; ++i) {
    const uint64_t key = (random() % 5000 + 1) << 21;  // addresses of pages: their low bits are all alike
    if (random() % 3 == 0) {
      fixed.erase(key);
      plain.erase(key);
    } else {
      REQUIRE(fixed.insert(key, i));
      plain[key] = i;
    }
  }
  CHECK(fixed.size() == plain.size());
  for (uint64_t number = 1; number <= 5000; ++number) {
    const int* found = fixed.find(number << 21);
    const auto expected = plain.find(number << 21);
    REQUIRE((found != nullptr) == (expected != plain.end()));
    if (found != nullptr) REQUIRE(*found == expected->second);
  }
  size_t visited = 0;
  fixed.for_each([&](uint64_t key, int value) {
    ++visited;
    CHECK(plain.at(key) == value);
  });
  CHECK(visited == plain.size());
}

TEST_CASE("of a fixed map all entries of a kind are erased at once, and no others", "[cupti]") {
  FixedMap<int> fixed;
  for (uint64_t key = 1; key <= 50'000; ++key) REQUIRE(fixed.insert(key << 21, static_cast<int>(key % 3)));
  size_t erased = 0;
  fixed.erase_if([&](int value) { return value == 1 && ++erased > 0; });
  CHECK(erased == 16'667);
  CHECK(fixed.size() == 50'000 - erased);
  for (uint64_t key = 1; key <= 50'000; ++key) REQUIRE((fixed.find(key << 21) != nullptr) == (key % 3 != 1));
}

TEST_CASE("a full fixed map says so and keeps what it has", "[cupti]") {
  FixedMap<int> fixed;
  for (uint64_t key = 1; key <= FixedMap<int>::kCapacity; ++key) REQUIRE(fixed.insert(key, 1));
  CHECK_FALSE(fixed.insert(FixedMap<int>::kCapacity + 1, 1));
  CHECK(fixed.insert(5, 2));
  CHECK(*fixed.find(5) == 2);
  CHECK_FALSE(fixed.insert(0, 1));
}
