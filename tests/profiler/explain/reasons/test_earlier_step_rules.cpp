#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of earlier_step_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("an error that was caught before is the reason where as much is still alive", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 400_MiB, .category = Category::unknown}});
  device.failure->event = 9;
  device.failure->allocated_bytes = 400_MiB;
  device.ooms = {{.event = 3, .outcome = Outcome::caught, .allocated_bytes = 450_MiB}};
  CHECK(reason_of(device) == "caught_traceback");
  device.ooms.front().outcome = Outcome::recovered;
  CHECK(reason_of(device).empty());
}

TEST_CASE("what a backward pass still needs of an earlier step is no leftover of it", "[explain][reasons]") {
  LiveBlock kept = kept_activation(300_MiB, 4);
  kept.saved_by = std::vector<Where>{{.node = "GeluBackward0"}};
  kept.requested_bytes = kept.bytes;
  DeviceHistory device = at_oom({kept});
  device.state.step = 5;
  CHECK(reason_of(device) == "outputs_of_earlier_step");
  device.state.step = 9;  // older than the step before: only what a variable has
  CHECK(reason_of(device) != "outputs_of_earlier_step");
  device.referrers = {{.variable = "variable 'images' in train (a.py:2)",
                       .made = kept.made,
                       .bytes = 300_MiB,
                       .storage_bytes = 300_MiB}};
  CHECK(find_reason({.device = device, .growths = {}})->how.front().starts_with("del images  # "));
  device.referrers.clear();
  device.state.step = 5;
  device.failure->phase = Phase::backward;
  CHECK(reason_of(device).empty());
}

TEST_CASE("a graph of the step before that no backward ran through wants no gradients", "[explain][reasons]") {
  const LiveBlock saved{.bytes = 200_MiB,
                        .category = Category::activation,
                        .phase = Phase::forward,
                        .step = 4,
                        .made = {.op = "aten::exp", .module = "ao", .source = "net.py:5"}};
  DeviceHistory device = at_oom({saved});
  device.state.step = 5;
  device.failure->where = {.op = "aten::sum", .module = "ao", .source = "net.py:7"};
  const LiveBlock result{
      .bytes = 512, .category = Category::output, .step = 4, .made = {.op = "aten::add", .source = "a.py:3"}};
  device.state.blocks.push_back(result);
  device.referrers = {{.variable = "variable 'eloc' in run (a.py:1)", .made = result.made, .nodes = 40, .bytes = 4}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "outputs_of_earlier_step");
  CHECK(reason->text.starts_with("a graph of step 4 through which no backward ran is still alive in step 5"));
  CHECK(reason->fix == "no_grad_in_evaluation");
  device.referrers.front().nodes = 0;
  CHECK(find_reason({.device = device, .growths = {}})->fix == "delete_outputs");
}

TEST_CASE("variables that the failing line is to replace still have what the turn before made", "[explain][reasons]") {
  const auto made_at = [](std::string_view op, std::string_view source) {
    return LiveBlock{.bytes = 100_MiB,
                     .requested_bytes = 100_MiB,
                     .category = Category::output,
                     .made = {.op = op, .source = source}};
  };
  const LiveBlock old = made_at("aten::sub", "k.py:20"), later = made_at("aten::relu", "k.py:22"),
                  data = made_at("aten::to", "k.py:10");
  DeviceHistory device = at_oom({old, later, data});
  device.failure->where = {.op = "aten::matmul", .source = "k.py:20"};
  device.failure->requested_bytes = 100_MiB;
  device.state.reserved_bytes = device.state.allocated_bytes;
  const auto refer = [](const char* name, const LiveBlock& block) {
    return Referrer{.variable = name, .made = block.made, .bytes = block.bytes, .storage_bytes = block.bytes};
  };
  device.referrers = {refer("variable 'vexp' in kmeans (k.py:5)", old),
                      refer("variable 'dexp' in kmeans (k.py:5)", later),
                      refer("variable 'Xg' in kmeans (k.py:5)", data)};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "outputs_of_earlier_turn");
  CHECK(reason->bytes == 200_MiB);
  CHECK(reason->how.front().starts_with("del vexp, dexp  # "));
  const DeviceHistory before = device;
  device.failure->where.op = "aten::div";  // a second tensor, larger than what the turn before has left
  device.failure->requested_bytes = 300_MiB;
  device.state.blocks.push_back(made_at("aten::zeros", "k.py:3"));
  device.state.blocks.back().bytes = device.state.blocks.back().requested_bytes = 300_MiB;
  device.referrers.push_back(refer("variable 'output' in window (k.py:2)", device.state.blocks.back()));
  CHECK(reason_of(device) != "outputs_of_earlier_turn");
  device = before;
  device.failure->where.module = "layer";  // its operand may be what an earlier layer of the loop made
  CHECK(reason_of(device) != "outputs_of_earlier_turn");
  device.failure->where = {.op = "aten::cat", .source = "k.py:20"};
  CHECK(reason_of(device) != "outputs_of_earlier_turn");
  device.failure->where = {.op = "aten::matmul", .source = "k.py:30"};
  CHECK(reason_of(device) != "outputs_of_earlier_turn");
}

TEST_CASE("who handles an earlier out-of-memory error is the function that both errors left", "[explain][reasons]") {
  DeviceHistory device =
      at_oom({kept_activation(100_MiB, 5)}, "/a/net.py:20 in forward\n/a/fit.py:78 in find\n/a/fit.py:90 in main");
  device.failure->event = 9;
  device.failure->allocated_bytes = 1_GiB;
  device.ooms = {{.event = 5,
                  .outcome = Outcome::caught,
                  .where = {.source = "net.py:31"},
                  .allocated_bytes = 1_GiB,
                  .stack = "/a/net.py:31 in forward\n/a/fit.py:72 in find\n/a/fit.py:90 in main"}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "caught_traceback");
  CHECK(
      reason->text ==
      "the traceback of an out-of-memory error at net.py:31, which find(), fit.py:78 handles, is still there, and its "
      "frames keep 1.00 GiB");
  CHECK(reason->kept_by == "the traceback of an out-of-memory error at net.py:31");
}

}  // namespace oomdiag
