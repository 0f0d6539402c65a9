#include "samples/cases/scopes.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {

TEST_CASE("a scope has the bytes at its begin, its peak and its end", "[cases]") {
  EventBuilder trace;
  trace.segment(20_MiB).alloc("before", 2_MiB);
  trace.begin_scope("sample#forward").alloc("a", 4_MiB).alloc("b", 3_MiB).free("b").end_scope("sample#forward");

  const ScopeSheet sheet = read_scopes(trace);

  REQUIRE(sheet.calls.size() == 1);
  CHECK(sheet.calls[0].name == "forward");
  CHECK(sheet.calls[0].begin_bytes == 2_MiB);
  CHECK(sheet.calls[0].peak_bytes == 9_MiB);
  CHECK(sheet.calls[0].end_bytes == 6_MiB);
  CHECK(sheet.calls[0].kept_bytes == 4_MiB);
}

TEST_CASE("what a layer keeps is what is alive when the scope around it ends", "[cases]") {
  EventBuilder trace;
  trace.segment(20_MiB).begin_scope("sample#forward");
  trace.begin_scope("fc1").alloc("a", 4_MiB).end_scope("fc1");
  trace.begin_scope("relu1").alloc("b", 2_MiB).end_scope("relu1").free("a");
  trace.end_scope("sample#forward").free("b");

  const ScopeSheet sheet = read_scopes(trace);

  REQUIRE(sheet.calls.size() == 3);
  CHECK(sheet.calls[1].kept_bytes == 0);
  CHECK(sheet.calls[2].kept_bytes == 2_MiB);
}

TEST_CASE("scopes that an exception leaves open end with the trace", "[cases]") {
  EventBuilder trace;
  trace.segment(20_MiB).begin_scope("sample#step").begin_scope("fc1").alloc("a", 4_MiB);

  const ScopeSheet sheet = read_scopes(trace);

  REQUIRE(sheet.calls.size() == 2);
  CHECK(sheet.calls[0].end_bytes == 4_MiB);
}

TEST_CASE("the end of a scope that began before the trace is passed over", "[cases]") {
  EventBuilder trace;
  trace.segment(20_MiB).end_scope("fc1").begin_scope("fc2").alloc("a", 4_MiB).end_scope("fc2");

  const ScopeSheet sheet = read_scopes(trace);

  REQUIRE(sheet.calls.size() == 1);
  CHECK(sheet.calls[0].kept_bytes == 4_MiB);
}

TEST_CASE("batches in flight are the most that was alive at once", "[cases]") {
  EventBuilder trace;
  trace.segment(20_MiB);
  for (const char* batch : {"1", "2"}) trace.begin_scope("load").alloc(batch, 3_MiB).end_scope("load");
  trace.free("1").begin_scope("load").alloc("3", 3_MiB).end_scope("load");

  CHECK(read_scopes(trace).most_alive.at("load") == 6_MiB);
}

TEST_CASE("a block that its op alone uses is transient", "[cases]") {
  EventBuilder trace;
  trace.segment(40_MiB);
  trace.op({.op = "aten::conv2d"}).alloc("out", 2_MiB).alloc("workspace", 9_MiB).free("workspace");
  trace.op({.op = "aten::relu"}).alloc("relu", 2_MiB).free("out").no_op();

  const ScopeSheet sheet = read_scopes(trace);

  REQUIRE(sheet.transients.size() == 1);
  CHECK(sheet.transients[0] == Transient{.op = "aten::conv2d", .node = "", .most_bytes = 9_MiB, .count = 1});
}

}  // namespace oomdiag
