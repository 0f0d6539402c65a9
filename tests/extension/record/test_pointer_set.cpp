#include <memory>
#include <thread>
#include <vector>

#include "extension/record/pointer_set.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("a set of pointers knows what was added, also while others ask", "[record][threads]") {
  const auto set = std::make_unique<PointerSet>();
  const std::vector<char> memory(1000 * 64);
  int lies = 0;
  std::thread other([&] {
    for (size_t i = 0; i < 1000; ++i) lies += set->contains(&memory[i * 64 + 1]) ? 1 : 0;
  });
  for (size_t i = 0; i < 1000; ++i) set->add(&memory[i * 64]);
  other.join();
  CHECK(lies == 0);
  for (size_t i = 0; i < 1000; ++i) REQUIRE(set->contains(&memory[i * 64]));
}

TEST_CASE("a set of pointers that is full forgets nothing and lies of nobody", "[record]") {
  const auto set = std::make_unique<PointerSet>();
  const std::vector<char> memory(20'000);
  for (const char& place : memory) set->add(&place);
  size_t known = 0;
  for (const char& place : memory) known += set->contains(&place) ? 1 : 0;
  CHECK(known >= 8000);
  CHECK(known <= 8192);
  CHECK_FALSE(set->contains(&known));
}
