#include <memory>

#include "extension/record/thread_numbers.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("a thread has PyTorch's number while that fits", "[record]") {
  const auto numbers = std::make_unique<ThreadNumbers>();
  for (uint64_t id : {1, 2, 77, 65'534}) {
    CHECK(numbers->take(id) == id);
    CHECK(ThreadNumbers::of_node(id) == id);
  }
}

TEST_CASE("two threads that live never share a number, however many there were", "[record]") {
  const auto numbers = std::make_unique<ThreadNumbers>();
  const uint16_t main = numbers->take(1);
  for (uint64_t id = 2; id < 200'000; ++id) {
    const uint16_t number = numbers->take(id);
    REQUIRE(number != main);
    REQUIRE(number != ThreadNumbers::kUnnumbered);
    numbers->release(number);
  }
}

TEST_CASE("a node of a thread whose number does not fit is no other thread's", "[record]") {
  for (uint64_t id : {65'535ul, 65'536ul, 65'537ul, 131'073ul, 1ul << 40}) {
    CHECK(ThreadNumbers::of_node(id) == ThreadNumbers::kUnnumbered);
  }
}
