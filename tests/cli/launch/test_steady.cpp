#include "cli/launch/steady.h"
#include "tests/catch.h"

namespace oomdiag {

using std::chrono::seconds;

TEST_CASE("a run is steady when its peak has not risen for as many steps as it took, three at least", "[cli]") {
  CHECK_FALSE(is_steady({.step = 4, .peak_step = 1}, {}));
  CHECK(is_steady({.step = 5, .peak_step = 1}, {}));
  CHECK_FALSE(is_steady({.step = 20, .peak_step = 10}, {}));
  CHECK(is_steady({.step = 21, .peak_step = 10}, {}));
}

TEST_CASE("steps that are asked for are all that counts", "[cli]") {
  CHECK_FALSE(is_steady({.step = 2, .peak_step = 1}, {.steps = 2}));
  CHECK(is_steady({.step = 3, .peak_step = 2}, {.steps = 2}));
}

TEST_CASE("a run goes as far as the one before it came", "[cli]") {
  CHECK_FALSE(is_steady({.step = 40, .peak_step = 2}, {.at_least = 50}));
  CHECK(is_steady({.step = 51, .peak_step = 2}, {.at_least = 50}));
}

TEST_CASE("a program that grows without end is ended nevertheless where that is asked for", "[cli]") {
  CHECK_FALSE(is_steady({.step = 200, .peak_step = 200}, {.most = 200}));
  CHECK(is_steady({.step = 201, .peak_step = 201}, {.most = 200}));
}

TEST_CASE("a run to the program's end is ended by its time limit alone", "[cli]") {
  const SteadyRule to_end{.to_end = true};
  CHECK_FALSE(is_steady({.step = 500, .peak_step = 1, .since_start = seconds(900)}, to_end));
  const SteadyRule within{.to_end = true, .longest = seconds(60)};
  CHECK_FALSE(is_steady({.step = 500, .peak_step = 1, .since_start = seconds(59)}, within));
  CHECK(is_steady({.step = 2, .peak_step = 2, .since_start = seconds(60)}, within));
}

TEST_CASE("a program without steps is given time", "[cli]") {
  CHECK_FALSE(is_steady({.step = 1, .peak_step = 1, .since_start = seconds(31), .since_peak = seconds(29)}, {}));
  CHECK(is_steady({.step = 1, .peak_step = 1, .since_start = seconds(35), .since_peak = seconds(31)}, {}));
  CHECK_FALSE(is_steady({.step = 1, .peak_step = 1, .since_start = seconds(100), .since_peak = seconds(40)}, {}));
  CHECK_FALSE(is_steady({}, {}));
}

}  // namespace oomdiag
