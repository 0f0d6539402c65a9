#include <algorithm>
#include <functional>
#include <vector>

#include "cli/experiments/border_search.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

/// Runs a search over 1..count on a GPU with `available` bytes; what a value takes and whether it passes the functions
/// say.
struct Tried {
  std::optional<int64_t> found{};
  std::vector<int64_t> values{};
};
Tried search(int64_t count, int64_t available, const std::function<int64_t(int64_t)>& bytes,
             const std::function<bool(int64_t)>& passes, int at_once = 2, std::optional<Line> prior = {}) {
  BorderSearch border(
      count, [](int64_t i) { return i + 1; }, 12, prior);
  Tried tried;
  for (auto next = border.next(at_once); !next.empty(); next = border.next(at_once)) {
    for (const int64_t position : next) {
      tried.values.push_back(position + 1);
      const bool passed = passes(position + 1);
      border.take(position, {.passes = passed,
                             .allocated_bytes = passed ? bytes(position + 1) : available,
                             .needed_bytes = bytes(position + 1),
                             .available_bytes = available});
    }
  }
  if (const auto position = border.found()) tried.found = *position + 1;
  return tried;
}

int64_t affine(int64_t value) { return 300'000 + 1'777 * value; }

}  // namespace

TEST_CASE("the smallest value that passes is found to the step", "[cli]") {
  const TryValues from_1234 = [](const std::vector<int64_t>& values) {
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
  for (const int64_t available : {400'000L, 5'000'000L, 11'000'000L, 100'000'000L}) {
    const int64_t border = (available - 300'000) / 1'777;
    for (const int at_once : {1, 2}) {
      const Tried tried = search(
          65536, available, affine, [&](int64_t v) { return affine(v) <= available; }, at_once);
      CHECK(tried.found == border);
      CHECK(tried.values.size() <= 12);
      for (int64_t v = border; v <= border + 3; ++v) {
        CHECK(std::find(tried.values.begin(), tried.values.end(), v) != tried.values.end());
      }
    }
  }
}

TEST_CASE("a border below where the bytes say, as fragmentation takes memory, is found too", "[cli]") {
  const int64_t available = 11'000'000;
  for (const int64_t border : {2000, 4321, 5999}) {
    const Tried tried = search(65536, available, affine, [&](int64_t v) { return v <= border; });
    CHECK(tried.found == border);
  }
}

TEST_CASE("where libraries choose other workspaces for larger values, twelve runs find a border", "[cli]") {
  // Bytes per value of deepcnn on a T4, where cuDNN's choice changes at some batches. One that fails shows a part of
  // what it misses, as it fails early.
  const auto bytes = [](int64_t value) {
    const double each = value < 1000 ? 5.96 : value < 4000 ? 3.43 : value < 7000 ? 2.25 : 1.82;
    return static_cast<int64_t>(1e6 * (12 + each * static_cast<double>(value)));
  };
  const auto find = [&](int64_t available, int at_once, int64_t most_runs) {
    BorderSearch search(
        65536, [](int64_t i) { return i + 1; }, most_runs);
    for (auto next = search.next(at_once); !next.empty(); next = search.next(at_once)) {
      for (const int64_t position : next) {
        const int64_t needed = bytes(position + 1), missing = std::max<int64_t>(0, needed - available);
        search.take(position, {.passes = missing == 0,
                               .allocated_bytes = std::min(needed, available),
                               .needed_bytes = missing == 0 ? needed : available + missing * 4 / 5,
                               .available_bytes = available});
      }
    }
    return search;
  };
  for (const int64_t available : {7'900'000'000L, 10'700'000'000L, 15'400'000'000L, 23'400'000'000L, 84'000'000'000L}) {
    for (const int at_once : {1, 2}) {
      const BorderSearch search = find(available, at_once, 12);
      const int64_t border = search.found().value() + 1;
      CAPTURE(available, at_once, border);
      CHECK(search.points().size() <= 12);
      CHECK(bytes(border) <= available);
      CHECK(bytes(border + 1) > available);
    }
  }
  // With 15.4 GB 6839 passes, 6840 to 6999 do not, and 7000 to 8453 do.
  const BorderSearch few = find(15'400'000'000, 2, 12), many = find(15'400'000'000, 2, 60);
  CHECK(few.found() == 6838);
  CHECK(few.may_pass_above());
  CHECK(many.found() == 8453);
  CHECK_FALSE(many.may_pass_above());
}

TEST_CASE("a larger value that passes again is found among the neighbours", "[cli]") {
  const int64_t available = 11'000'000, border = (available - 300'000) / 1'777;
  const Tried tried = search(65536, available, affine, [&](int64_t v) { return v <= border - 4 || v == border; });
  CHECK(tried.found == border);
}

TEST_CASE("a border far from where it was guessed is found in few runs", "[cli]") {
  constexpr int64_t kStep = 2, kLeast = 256, kMax = int64_t{1} << 30;
  for (const int64_t border : {kLeast, int64_t{300}, int64_t{10'000}, int64_t{60'000'000}, kMax}) {
    for (const Bracket guess : {Bracket{60'000'000 - 2, 60'000'000}, Bracket{9'000, 9'400}, Bracket{0, 258}}) {
      CAPTURE(border, guess.fails);
      int runs = 0;
      const TryValues experiments = [&](const std::vector<int64_t>& values) {
        std::vector<bool> passed;
        for (const int64_t value : values) passed.push_back(value >= border);
        runs += static_cast<int>(values.size());
        return passed;
      };
      const Bracket found = find_bracket(guess, kStep, kLeast, kMax, experiments);
      CHECK(found.fails < border);
      CHECK(found.passes >= border);
      CHECK(runs <= 30);
      CHECK(find_smallest(found.fails, found.passes, kStep, 1, experiments) == border);
    }
  }
}

TEST_CASE("at the ends of a range the search ends", "[cli]") {
  const auto all = [](int64_t) { return true; };
  CHECK(search(20, 1 << 30, affine, all).found == 20);
  CHECK(search(1, 1 << 30, affine, all).found == 1);
  CHECK_FALSE(search(20, 1000, affine, [](int64_t) { return false; }).found);
  CHECK(search(20, 1000, affine, [](int64_t v) { return v == 1; }).found == 1);
}

TEST_CASE("what another GPU has shown saves runs", "[cli]") {
  const int64_t available = 11'000'000, border = (available - 300'000) / 1'777;
  const Line line{.fixed_bytes = 300'000, .slope = 1'777};
  const auto passes = [&](int64_t v) { return affine(v) <= available; };
  const Tried with = search(65536, available, affine, passes, 1, line),
              without = search(65536, available, affine, passes, 1);
  CHECK(with.found == border);
  CHECK(with.values.at(1) > border * 8 / 10);
  CHECK(with.values.size() <= without.values.size());
}

}  // namespace oomdiag
