#include <chrono>
#include <thread>

#include "profiler/trace/ticks.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("the counter grows about as fast as is said of it", "[trace]") {
  const uint64_t begin = read_ticks();
  const uint64_t begin_ns = monotonic_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto ticks = static_cast<double>(read_ticks() - begin);
  const double seconds = static_cast<double>(monotonic_ns() - begin_ns) / 1e9;

  const double share = ticks / seconds / static_cast<double>(ticks_per_second());
  CHECK(share > 0.2);
  CHECK(share < 5);
}
