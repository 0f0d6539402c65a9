#include "profiler/replay/replay.h"
#include "profiler/report/device_reads.h"
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

TEST_CASE("an op that reads from the card of its own accord is named with its line", "[report]") {
  EventBuilder trace;
  for (int i = 0; i < 3; ++i) trace.op({.op = "aten::nonzero", .source = "/home/me/train.py:88"}).read_from_card();
  trace.op({.op = "aten::is_nonzero", .inner = "aten::_local_scalar_dense", .source = "train.py:90"}).read_from_card();

  CHECK(reads_of(trace) ==
        std::vector<std::string>{"data-dependent: nonzero at train.py:88, 3 times; peaks after it are a lower bound",
                                 "data-dependent: is_nonzero at train.py:90; peaks after it are a lower bound"});
}

TEST_CASE("values that the program asked for are told in one sentence", "[report]") {
  EventBuilder trace;
  for (int line = 1; line <= 5; ++line) {
    trace.op({.op = "aten::item", .source = "train.py:" + std::to_string(line)}).read_from_card();
  }

  const auto limits = reads_of(trace);
  REQUIRE(limits.size() == 1);
  CHECK(limits[0].starts_with("values that the card did not compute were read as zeros: item at train.py:1; "));
  CHECK(limits[0].find("; 2 more places; it matters only") != std::string::npos);
}

TEST_CASE("of many places the most frequent are named and the others counted", "[report]") {
  EventBuilder trace;
  for (int line = 1; line <= 9; ++line) {
    const std::string source = "train.py:" + std::to_string(line);
    for (int i = 0; i < line; ++i) trace.op({.op = "aten::unique_dim", .source = source}).read_from_card();
  }

  const auto limits = reads_of(trace);
  REQUIRE(limits.size() == 6);
  CHECK(limits[0] == "data-dependent: unique_dim at train.py:9, 9 times; peaks after it are a lower bound");
  CHECK(limits[5] == "data-dependent: 4 more places");
}

TEST_CASE("a program that reads nothing has nothing to be told", "[report]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).note("unsupported", "cublasFoo");
  CHECK(reads_of(trace).empty());
}
