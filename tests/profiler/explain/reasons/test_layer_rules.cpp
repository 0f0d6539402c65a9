#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of layer_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("results of each layer that stay without a graph are named with what keeps them", "[explain][reasons]") {
  std::vector<LiveBlock> results;
  for (const std::string_view module : {"layers.0", "layers.1", "layers.2", "layers.3"}) {
    results.push_back({.bytes = 20_MiB,
                       .category = Category::output,
                       .phase = Phase::forward,
                       .step = 5,
                       .made = {.op = "aten::add", .module = module, .source = "net.py:7"},
                       .shape = "[16, 512, 384] float32"});
  }
  DeviceHistory device = at_oom(results);
  device.failure->where = {.op = "aten::mul", .module = "layers.4", .source = "net.py:6"};
  device.failure->no_grad = true;
  device.referrers = {{.variable = "tuple 'hidden_states' in forward (net.py:20)", .made = results.front().made}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "results_of_each_layer");
  CHECK(reason->text ==
        "a result of each of 4 layers is kept: 80.00 MiB of 'layers.*' at net.py:7, [16, 512, 384] float32");
  device.failure->where.module = "head";
  CHECK(reason_of(device) != "results_of_each_layer");
  device.failure->where.module = "layers.4";
  device.failure->no_grad = false;  // a graph may need them
  CHECK(reason_of(device) != "results_of_each_layer");
}

TEST_CASE("a cache that is joined anew is there twice", "[explain][reasons]") {
  std::vector<LiveBlock> blocks;
  for (const uint32_t step : {4U, 5U}) {
    for (int layer = 0; layer < 4; ++layer) {
      blocks.push_back({.bytes = 16_MiB,
                        .category = Category::output,
                        .phase = Phase::forward,
                        .step = step,
                        .made = {.op = "aten::cat", .module = "h.1", .source = "cache.py:9"}});
    }
  }
  DeviceHistory device = at_oom(blocks);
  device.failure->where = {.op = "aten::cat", .module = "h.5", .source = "cache.py:9"};
  device.failure->no_grad = true;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "copied_cache");
  CHECK(reason->text ==
        "aten::cat at cache.py:9 makes a cache anew while that of the step before is still there: 64.00 MiB of it, and "
        "64.00 MiB of the new one so far");
  device.failure->where.source = "cache.py:10";
  CHECK(reason_of(device) != "copied_cache");
}

TEST_CASE("a loop in a graph of a program without an optimizer learns nothing", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 100_MiB, .category = Category::output}});
  device.attribution.backward_bytes = 0;
  device.failure->where = {.op = "aten::linear", .source = "wave.py:9"};
  const StepAllocation result = graph_block("", 4_MiB);
  device.step_allocations = {.step = 5, .blocks = std::vector<StepAllocation>(16, result)};
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.step_allocations.blocks.pop_back();
  CHECK(reason_of(device).empty());
  device.step_allocations.blocks.resize(16, result);
  device.failure->no_grad = true;
  CHECK(reason_of(device).empty());
}

}  // namespace oomdiag
