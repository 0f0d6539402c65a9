#include <algorithm>
#include <functional>
#include <vector>

#include "cli/search.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

/// Runs a search over 1..count on a card with `room`; what a value takes and whether it passes is told by the functions.
struct Tried {
  std::optional<int64_t> found{};
  std::vector<int64_t> values{};
};
Tried search(int64_t count, int64_t room, const std::function<int64_t(int64_t)>& bytes,
             const std::function<bool(int64_t)>& passes, int at_once = 2, std::optional<Line> prior = {}) {
  BorderSearch border(
      count, [](int64_t i) { return i + 1; }, 12, prior);
  Tried tried;
  for (auto next = border.next(at_once); !next.empty(); next = border.next(at_once)) {
    for (const int64_t position : next) {
      tried.values.push_back(position + 1);
      const bool passed = passes(position + 1);
      border.take(position, {.passes = passed,
                             .allocated_bytes = passed ? bytes(position + 1) : room,
                             .needed_bytes = bytes(position + 1),
                             .room_bytes = room});
    }
  }
  if (const auto position = border.found()) tried.found = *position + 1;
  return tried;
}

int64_t affine(int64_t value) { return 300'000 + 1'777 * value; }

}  // namespace

TEST_CASE("the smallest value that passes is found to the step", "[cli]") {
  const TrialsOf from_1234 = [](const std::vector<int64_t>& values) {
    std::vector<bool> passed;
    for (const int64_t value : values) passed.push_back(value >= 1234);
    return passed;
  };
  for (const int at_once : {1, 2, 5}) {
    CHECK(find_smallest(100, 5000, 1, at_once, from_1234) == 1234);
    CHECK(find_smallest(100, 5000, 10, at_once, from_1234) == 1240);
    CHECK(find_smallest(1232, 1234, 2, at_once, from_1234) == 1234);
  }
}

TEST_CASE("where bytes are affine the border and its neighbours take twelve runs of 65536", "[cli]") {
  for (const int64_t room : {400'000L, 5'000'000L, 11'000'000L, 100'000'000L}) {
    const int64_t border = (room - 300'000) / 1'777;
    for (const int at_once : {1, 2}) {
      const Tried tried = search(
          65536, room, affine, [&](int64_t v) { return affine(v) <= room; }, at_once);
      CHECK(tried.found == border);
      CHECK(tried.values.size() <= 12);
      for (int64_t v = border; v <= border + 3; ++v) {
        CHECK(std::find(tried.values.begin(), tried.values.end(), v) != tried.values.end());
      }
    }
  }
}

TEST_CASE("a border below where the bytes say, as holes take room, is found too", "[cli]") {
  const int64_t room = 11'000'000;
  for (const int64_t border : {2000, 4321, 5999}) {
    const Tried tried = search(65536, room, affine, [&](int64_t v) { return v <= border; });
    CHECK(tried.found == border);
  }
}

TEST_CASE("a larger value that passes again is found among the neighbours", "[cli]") {
  const int64_t room = 11'000'000, border = (room - 300'000) / 1'777;
  const Tried tried = search(65536, room, affine, [&](int64_t v) { return v <= border - 4 || v == border; });
  CHECK(tried.found == border);
}

TEST_CASE("at the ends of a range the search ends", "[cli]") {
  const auto all = [](int64_t) { return true; };
  CHECK(search(20, 1 << 30, affine, all).found == 20);
  CHECK(search(1, 1 << 30, affine, all).found == 1);
  CHECK_FALSE(search(20, 1000, affine, [](int64_t) { return false; }).found);
  CHECK(search(20, 1000, affine, [](int64_t v) { return v == 1; }).found == 1);
}

TEST_CASE("what another card has shown saves runs", "[cli]") {
  const int64_t room = 11'000'000, border = (room - 300'000) / 1'777;
  const Line line{.fixed_bytes = 300'000, .slope = 1'777};
  const auto passes = [&](int64_t v) { return affine(v) <= room; };
  const Tried with = search(65536, room, affine, passes, 1, line), without = search(65536, room, affine, passes, 1);
  CHECK(with.found == border);
  CHECK(with.values.at(1) > border * 8 / 10);
  CHECK(with.values.size() <= without.values.size());
}

}  // namespace oomdiag
