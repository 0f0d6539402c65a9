#include <sstream>

#include "profiler/shape_function/evaluate.h"
#include "profiler/shape_function/single_call.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

constexpr char kForm[] =
    R"({"op":["aten::sum","dim_IntList"],"mode":"----fm-","in":[{"t":["Float",[#,#],[#,#],false,true]}]})";

/// The bytes of a workspace that no polynomial gives: three rounds of pages, then one for each batch.
int64_t workspace_of(int64_t batch) { return batch < 10 ? 0 : (batch / 7) * 4_MiB; }

OpCalls call_with(uint32_t id, int64_t batch) {
  return {.calls = {{.id = id, .form = 0, .numbers = {batch, 8, 8, 1}}}, .forms = {kForm}};
}

/// Weights, and an operator that returns a tensor and takes a workspace meanwhile.
AllocationSequence run(int64_t batch) {
  EventBuilder builder;
  builder.op({.op = "aten::empty"}).alloc("weights", 30_MiB);
  builder.op({.op = "aten::sum"}).alloc("a", batch * 1_MiB);
  if (workspace_of(batch) > 0) builder.alloc("w", workspace_of(batch)).free("w");
  builder.begin_scope("Optimizer.step#SGD.step").end_scope("Optimizer.step#SGD.step");
  builder.trace().step_ends.push_back(builder.trace().events.back().sequence);
  builder.trace().process.end_state = EndState::exited;
  AllocationSequence sequence = read_allocation_sequence(builder.trace());
  sequence.calls = call_with(sequence.allocations.at(1).call, batch);
  return sequence;
}

ShapeFunction learn() {
  std::vector<ShapeSample> samples;
  for (const int64_t batch : {4, 20, 41, 60}) samples.push_back({{batch}, run(batch)});
  return ShapeFunction::learn(std::move(samples));
}

/// What the operator would do alone.
std::vector<MadeAlone> make_alone(const std::vector<CallAtPoint>& calls, int64_t too_much = 0) {
  std::vector<MadeAlone> made;
  for (const CallAtPoint& call : calls) {
    const int64_t batch = call.point.front(), workspace = workspace_of(batch) + too_much;
    made.push_back(std::vector<int64_t>{batch * 1_MiB});
    if (workspace > 0) made.back()->insert(made.back()->end(), {workspace, -2});
  }
  return made;
}

}  // namespace

TEST_CASE("arguments are read as a form and its numbers, and written back", "[shape_function]") {
  std::istringstream lines(
      "7\t{\"op\":[\"aten::mm\",\"\"],\"in\":[[64,-1],{\"f\":\"0x1.8p+1\"},null]}\n"
      "no number\t{}\n"
      "9\t{\"op\":[\"aten::mm\",\"\"],\"in\":[[128,-1],{\"f\":\"0x1.8p+1\"},null]}\n"
      "11\t{\"op\":[\"aten::mm\",\"\"],\"in\":[[1");
  const OpCalls calls = read_op_calls(lines);
  REQUIRE(calls.calls.size() == 2);
  CHECK(calls.forms == std::vector<std::string>{R"({"op":["aten::mm",""],"in":[[#,#],{"f":"0x1.8p+1"},null]})"});
  CHECK(calls.find(9) == 1);
  CHECK(calls.find(8) == OpCalls::kNone);
  CHECK(calls.calls[1].numbers == std::vector<int64_t>{128, -1});
  CHECK(write_op_call(calls.forms[0], {128, -1}) == R"({"op":["aten::mm",""],"in":[[128,-1],{"f":"0x1.8p+1"},null]})");
}

TEST_CASE("an operator that is made alone shows the workspace that no polynomial gives", "[shape_function]") {
  ShapeFunction function = learn();
  const std::vector<ShapePoint> points{{50}};
  CHECK_FALSE(evaluate(function, points.front(), 100_GiB).allocated_is_exact);
  const std::vector<CallAtPoint> calls = function.list_unknown_calls(points);
  REQUIRE(calls.size() == 5);  // four to prove it by, and the one that is needed
  CHECK(calls.back().text.find("[50,8]") != std::string::npos);
  function.take(calls, make_alone(calls));
  const ShapeEstimate estimate = evaluate(function, points.front(), 100_GiB);
  CHECK(estimate.is_exact());
  CHECK(estimate.peak_allocated_bytes == 80_MiB + workspace_of(50));
}

TEST_CASE("an operator that alone does not do what it did in the program shows nothing", "[shape_function]") {
  ShapeFunction function = learn();
  const std::vector<ShapePoint> points{{50}};
  const std::vector<CallAtPoint> calls = function.list_unknown_calls(points);
  function.take(calls, make_alone(calls, /*too_much=*/1));
  CHECK_FALSE(evaluate(function, points.front(), 100_GiB).allocated_is_exact);
  CHECK(function.list_unknown_calls(points).empty());  // it is not asked again
}

TEST_CASE("an operator that cannot be made alone leaves its sizes unknown", "[shape_function]") {
  ShapeFunction function = learn();
  const std::vector<ShapePoint> points{{50}};
  const std::vector<CallAtPoint> calls = function.list_unknown_calls(points);
  function.take(calls, std::vector<MadeAlone>(calls.size()));
  CHECK_FALSE(evaluate(function, points.front(), 100_GiB).allocated_is_exact);
}

TEST_CASE("a length that a kernel pads is a number that follows it", "[shape_function]") {
  MergedSequence merged;
  std::vector<ShapePoint> points;
  for (const int64_t length : {16, 241, 31, 136}) {
    points.push_back({length});
    merged.op_calls.push_back(call_with(1, (length + 31) / 32 * 32));
    merged.sizes.push_back({});
    merged.calls.push_back({});
  }
  const auto call = find_single_call(merged, points, {.calls = {0, 0, 0, 0}}, {});
  REQUIRE(call);
  CHECK(call->numbers.front().multiples == std::vector<int64_t>{32});
  CHECK(call->numbers.front().at({97}, nullptr) == 128);
}

TEST_CASE("allocations that belong to the process may be missing when a call is made again", "[shape_function]") {
  SingleCall call{.points = {{1}, {2}}, .sizes = {{8, 100, 0}, {8, 200, 30}}, .may_lack = {true, false, false}};
  call.prove({{{100}}, {{200, 30, -2}}});
  REQUIRE(call.state == SingleCall::State::proved);
  CHECK(call.assign({400}) == std::vector<int64_t>{-1, 400, 0});
  CHECK(call.assign({400, 50}) == std::vector<int64_t>{-1, 400, 50});
  CHECK_FALSE(call.assign({400, 50, 60}));
}

TEST_CASE("a call that takes another way at a point is played there as it was made", "[shape_function]") {
  ShapeFunction function = learn();
  const std::vector<ShapePoint> points{{50}};
  const std::vector<CallAtPoint> calls = function.list_unknown_calls(points);
  std::vector<MadeAlone> made = make_alone(calls);
  made.back() = {200_MiB, -1, 50_MiB, 70_MiB, -3};  // two workspaces, one after the other
  function.take(calls, made);
  const ShapeEstimate estimate = evaluate(function, points.front(), 100_GiB);
  CHECK(estimate.is_exact());
  CHECK(estimate.peak_allocated_bytes == 230_MiB);
}

TEST_CASE("a call that leaves another number of results shows nothing", "[shape_function]") {
  ShapeFunction function = learn();
  const std::vector<ShapePoint> points{{50}};
  const std::vector<CallAtPoint> calls = function.list_unknown_calls(points);
  std::vector<MadeAlone> made = make_alone(calls);
  made.back() = {200_MiB, 50_MiB, 70_MiB};
  function.take(calls, made);
  CHECK_FALSE(evaluate(function, points.front(), 100_GiB).is_exact());
}

TEST_CASE("a call that made as many allocations in two ways is not guessed at", "[shape_function]") {
  SingleCall call{.points = {{1}, {2}}, .sizes = {{100, 0, 7}, {200, 30, 0}}, .may_lack = {false, false, false}};
  call.prove({{{100, 7}}, {{200, 30}}});
  REQUIRE(call.state == SingleCall::State::proved);
  CHECK_FALSE(call.assign({400, 60}));
}

}  // namespace oomdiag
