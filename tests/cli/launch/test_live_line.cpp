#include "cli/launch/live_line.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

TEST_CASE("the live line draws the peaks of the last steps, the newest of them where there is little space", "[live]") {
  const std::vector<int64_t> growing = {8_GiB, 9_GiB, 10_GiB, 11_GiB, 12_GiB, 13_GiB, 14_GiB, 15_GiB};
  CHECK(describe_step_peaks(growing, 80) == "   steps ▁▂▃▄▅▆▇█ 8.00 to 15.00 GiB");
  CHECK(describe_step_peaks(growing, 33) == "   steps ▁▃▅▆█ 11.00 to 15.00 GiB");
  CHECK(describe_step_peaks(growing, 20).empty());
}

TEST_CASE("steps that are alike are a flat line, and few steps none", "[live]") {
  CHECK(describe_step_peaks({2_MiB, 2_MiB, 2_MiB, 2_MiB}, 80) == "   steps ▁▁▁▁ 2.00 MiB");
  CHECK(describe_step_peaks({2_MiB, 4_MiB, 2_MiB}, 80).empty());
  CHECK(describe_step_peaks({}, 80).empty());
}
