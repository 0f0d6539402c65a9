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

TEST_CASE("a pointer that was removed is not in the set, and those beside it are", "[record]") {
  const auto set = std::make_unique<PointerSet>();
  const std::vector<char> memory(4000);
  for (const char& place : memory) set->add(&place);
  for (size_t i = 0; i < memory.size(); i += 2) set->remove(&memory[i]);
  for (size_t i = 0; i < memory.size(); ++i) REQUIRE(set->contains(&memory[i]) == (i % 2 != 0));
  for (size_t i = 0; i < memory.size(); i += 2) set->add(&memory[i]);
  for (const char& place : memory) REQUIRE(set->contains(&place));
}

TEST_CASE("a set of pointers serves for ever where those that come replace those that go", "[record]") {
  const auto set = std::make_unique<PointerSet>();
  const std::vector<char> memory(200'000);
  const char* const stays = &memory[0];
  set->add(stays);
  for (size_t i = 1; i < memory.size(); ++i) {
    set->add(&memory[i]);
    REQUIRE(set->contains(&memory[i]));
    if (i > 50) set->remove(&memory[i - 50]);
    REQUIRE(set->contains(stays));
  }
  CHECK_FALSE(set->contains(&memory[7]));
}
