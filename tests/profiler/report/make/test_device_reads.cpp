#include "profiler/replay/replay.h"
#include "profiler/report/make/device_reads.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

namespace {

std::vector<std::string> reads_of(const Trace& trace) {
  std::vector<std::string> limits;
  add_reads(replay(trace).reads, /*all_counted=*/true, limits);
  return limits;
}

}  // namespace

TEST_CASE("an op that wants a size from the GPU makes peaks a lower bound, and is named with its line", "[report]") {
  EventBuilder trace;
  for (int i = 0; i < 3; ++i) trace.op({.op = "aten::nonzero", .source = "/home/me/train.py:88"}).read_from_gpu();
  trace.op({.op = "aten::index", .source = "train.py:90"}).read_from_gpu();

  CHECK(reads_of(trace) ==
        std::vector<std::string>{"data-dependent sizes, so that peaks after them are a lower bound: nonzero at "
                                 "train.py:88, 3 times; index at train.py:90"});
  CHECK(depends_on_data(replay(trace).reads));
}

TEST_CASE("values that the program asked for, and branches on them, are one quiet line", "[report]") {
  EventBuilder trace;
  for (int line = 1; line <= 4; ++line) {
    trace.op({.op = "aten::item", .source = "train.py:" + std::to_string(line)}).read_from_gpu();
  }
  trace.op({.op = "aten::is_nonzero", .inner = "aten::_local_scalar_dense", .source = "train.py:9"}).read_from_gpu();

  CHECK(reads_of(trace) ==
        std::vector<std::string>{
            "values that no kernel computed were read as zeros: is_nonzero at train.py:9 and 4 more"});
  CHECK_FALSE(depends_on_data(replay(trace).reads));
}

TEST_CASE("of many places the most frequent are named and the others counted", "[report]") {
  EventBuilder trace;
  for (int line = 1; line <= 9; ++line) {
    const std::string source = "train.py:" + std::to_string(line);
    for (int i = 0; i < line; ++i) trace.op({.op = "aten::unique_dim", .source = source}).read_from_gpu();
  }

  const auto limits = reads_of(trace);
  REQUIRE(limits.size() == 1);
  CHECK(limits[0].find("bound: unique_dim at train.py:9, 9 times; unique_dim at train.py:8, 8 times; ") !=
        std::string::npos);
  CHECK(limits[0].ends_with("; 4 more places"));
}

TEST_CASE("a program that reads nothing has nothing to report", "[report]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).note("unsupported", "cublasFoo");
  CHECK(reads_of(trace).empty());
}
