#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of copy_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("rows that are repeated before the layers are named by their line", "[explain][reasons]") {
  const LiveBlock rows{.bytes = 20_MiB, .requested_bytes = 20_MiB, .category = Category::input};
  LiveBlock copies{.bytes = 100_MiB,
                   .requested_bytes = 100_MiB,
                   .category = Category::input,
                   .made = {.op = "aten::repeat_interleave", .source = "a.py:3"}};
  LiveBlock keys = copies;
  keys.made = {.op = "aten::linear", .module = "k", .source = "a.py:5"};
  DeviceHistory device = at_oom({rows, copies, keys, keys});
  CHECK(reason_of(device).empty());  // it trains
  device.attribution.backward_bytes = 0;
  CHECK(reason_of(device) == "repeated_copies");
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "aten::repeat_interleave at a.py:3 copies rows, and what follows is as large: 3 tensors of 100.00 MiB");
  CHECK(reason_of(at_oom({copies, keys, keys})).empty());
}

TEST_CASE("results of elementwise ops beside one another could be one", "[explain][reasons]") {
  LiveBlock wide{.bytes = 64_MiB,
                 .requested_bytes = 64_MiB,
                 .category = Category::output,
                 .step = 5,
                 .made = {.op = "aten::to", .source = "a.py:3"}};
  LiveBlock divided = wide;
  divided.made = {.op = "aten::div", .source = "a.py:4"};
  DeviceHistory device = at_oom({wide, divided});
  device.failure->where = {.op = "aten::clamp", .source = "a.py:5"};
  CHECK(reason_of(device) == "elementwise_copies");
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "3 results of elementwise ops, 64.00 MiB each, are alive at once (a.py:3, 4, 5): 192.00 MiB");
}

TEST_CASE("what is repeated is named where only one tensor may be that", "[explain][reasons]") {
  const LiveBlock mask{.bytes = 4_MiB,
                       .requested_bytes = 4_MiB,
                       .category = Category::buffer,
                       .name = "causal_mask",
                       .shape = "[2048, 2048] bool"};
  DeviceHistory device = at_oom({mask});
  device.failure->requested_bytes = 192_MiB;
  device.failure->where = {.op = "aten::repeat", .module = "Model", .source = "model.py:4"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "repeated_copies");
  CHECK(reason->text == "aten::repeat at model.py:4 copies causal_mask [2048, 2048] bool 48 times: 192.00 MiB in all");
  LiveBlock other = mask;
  other.requested_bytes = 2_MiB;
  device.state.blocks.push_back(other);
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "aten::repeat at model.py:4 copies a tensor many times: 192.00 MiB in all");
  device.failure->where.op = "aten::reshape";  // of a view
  CHECK(
      find_reason({.device = device, .growths = {}})->text ==
      "aten::reshape at model.py:4 writes out a tensor that was expanded or unfolded: 192.00 MiB of at most 4.00 MiB");
}

TEST_CASE("a copy in a wider type is named with what it is copied from", "[explain][reasons]") {
  const LiveBlock masks{.bytes = 40_MiB,
                        .requested_bytes = 40_MiB,
                        .category = Category::output,
                        .made = {.op = "aten::logical_not", .source = "eval.py:3"},
                        .shape = "[160, 512, 512] bool"};
  DeviceHistory device = at_oom({masks});
  device.referrers = {{.variable = "variable 'masks' in f (eval.py:1)", .made = masks.made, .storage_bytes = 40_MiB}};
  device.failure->requested_bytes = 160_MiB;
  device.failure->where = {.op = "aten::to", .source = "eval.py:4"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "large_cast");
  CHECK(reason->text ==
        "aten::to at eval.py:4 makes a copy of 160.00 MiB in another type, 4 times as large as variable 'masks' in f "
        "(eval.py:1), [160, 512, 512] bool");
}

TEST_CASE("weights that are cast one after the other are named with their model", "[explain][reasons]") {
  const LiveBlock wide{
      .bytes = 60_MiB, .requested_bytes = 60_MiB, .made = {.op = "aten::to", .source = "prepare.py:4"}};
  const LiveBlock narrow{.bytes = 32_MiB, .requested_bytes = 32_MiB, .made = {.op = "aten::to", .source = "load.py:4"}};
  DeviceHistory device = at_oom({wide, wide, narrow});
  device.failure->where = {.op = "aten::to", .source = "prepare.py:4"};
  CHECK(reason_of(device) != "widened_weights");
  device.referrers = {{.variable = "dict 'model._modules[\"a\"]._parameters' in main (a.py:1)",
                       .made = wide.made,
                       .storage_bytes = 60_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "widened_weights");
  CHECK(
      reason->text ==
      "the parameters of 'model' are copied into a type twice as wide at prepare.py:4: 120.00 MiB so far, 60.00 MiB of "
      "them more than before");
  device.state.blocks.pop_back();  // a model of one type that goes to the GPU
  CHECK(reason_of(device) != "widened_weights");
}

TEST_CASE("a model in evaluation mode that nobody trains has too large a batch, with a graph or without",
          "[explain][reasons]") {
  const LiveBlock result{
      .bytes = 60_MiB, .category = Category::output, .made = {.op = "aten::linear", .module = "net.head"}};
  DeviceHistory device = at_oom({result});
  device.attribution.backward_bytes = 0;
  device.failure->where = {.op = "aten::lstm", .module = "net.lstm", .source = "a.py:4"};
  device.step_allocations.blocks = {graph_block("net.head", 1_MiB)};
  CHECK(reason_of(device) != "batch_without_gradients");
  device.failure->modules_evaluate = true;
  CHECK(reason_of(device) == "batch_without_gradients");
  device.state.blocks.front().shape = "[1, 24, 1536000] float32";
  CHECK(find_reason({.device = device, .growths = {}})
            ->text.starts_with("the whole length of one sample, [1, 24, 1536000],"));
}

TEST_CASE("a forward pass without gradients in a step of training has its own batch", "[explain][reasons]") {
  const LiveBlock result{
      .bytes = 60_MiB, .category = Category::output, .made = {.op = "aten::linear", .module = "members.1"}};
  DeviceHistory device = at_oom({result});
  device.failure->where = {.op = "aten::add", .module = "members.1", .source = "a.py:4"};
  device.step_allocations.blocks = {graph_block("policy", 1_MiB)};
  CHECK(reason_of(device) != "batch_without_gradients");
  device.failure->no_grad = true;
  CHECK(reason_of(device) == "batch_without_gradients");
}

TEST_CASE("a sum of booleans makes numbers of 64 bits first", "[explain][reasons]") {
  const LiveBlock mask{
      .bytes = 64_MiB, .requested_bytes = 64_MiB, .category = Category::input, .shape = "[1, 1, 8192, 8192] bool"};
  DeviceHistory device = at_oom({mask});
  device.failure->where = {.op = "aten::sum", .inner = "aten::empty_strided", .module = "layers.0", .source = "m.py:4"};
  device.failure->requested_bytes = 512_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "large_cast");
  CHECK(reason->how.front().starts_with("mask.all(-1)"));
  device.failure->where.inner = "aten::sum";
  CHECK(reason_of(device) != "large_cast");
}

}  // namespace oomdiag
