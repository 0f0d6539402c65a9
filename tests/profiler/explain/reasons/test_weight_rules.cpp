#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of weight_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("tensors without an op that are as large as weights came from a file", "[explain][reasons]") {
  const LiveBlock weight{
      .bytes = 64_MiB, .requested_bytes = 64_MiB, .category = Category::parameter, .name = "0.weight"};
  const LiveBlock loaded{.bytes = 64_MiB, .requested_bytes = 64_MiB, .phase = Phase::forward, .step = 1};
  CHECK(reason_of(at_oom({weight, loaded, loaded})) == "loaded_onto_gpu");
  LiveBlock other = loaded;
  other.requested_bytes = 60_MiB;
  CHECK(reason_of(at_oom({weight, other, other})).empty());
}

TEST_CASE("copies of all weights beside them are another model", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = weight.requested_bytes = 50_MiB;
  LiveBlock copy = weight;
  copy.category = Category::input;
  copy.name = {};
  copy.made = {.op = "aten::clone", .source = "average.py:3"};
  LiveBlock other = weight;
  other.name = "1.weight";
  const auto reason = find_reason({.device = at_oom({weight, other, copy, copy}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_models");
  CHECK(reason->fix == "copies_on_host");
  CHECK(reason_of(at_oom({weight, other, copy})) != "several_models");
}

TEST_CASE("a model that is half on the GPU is another one, while the one before is there", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = weight.requested_bytes = 50_MiB;
  LiveBlock other = weight;
  other.name = "1.weight";
  LiveBlock moved = weight;
  moved.category = Category::input;
  moved.name = {};
  moved.made = {.op = "aten::to", .source = "trials.py:3"};
  moved.bytes = moved.requested_bytes = 2_MiB;
  LiveBlock small = weight;
  small.name = "2.weight";
  small.bytes = small.requested_bytes = 2_MiB;
  DeviceHistory device = at_oom({weight, other, small, moved, moved});
  CHECK(reason_of(device) != "several_models");  // of a few weights
  device.failure->where = moved.made;
  device.failure->requested_bytes = 50_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_models");
  CHECK(reason->fix == "drop_models");
}

TEST_CASE("a file that is still there is named before what the step needs, where the request would fit without it",
          "[explain][reasons]") {
  const LiveBlock weight{.bytes = 20_MiB,
                         .requested_bytes = 20_MiB,
                         .category = Category::parameter,
                         .name = "0.weight",
                         .shape = "[20000, 256] float32"};
  const LiveBlock loaded{.bytes = 20_MiB, .requested_bytes = 20_MiB, .phase = Phase::forward, .step = 1};
  const LiveBlock logits{.bytes = 80_MiB,
                         .requested_bytes = int64_t{1024} * 20000 * 4,
                         .category = Category::output,
                         .made = {.op = "aten::linear"}};
  DeviceHistory device = at_oom({weight, loaded, logits});
  device.failure->requested_bytes = 15_MiB;
  device.state.reserved_bytes = device.state.allocated_bytes;
  CHECK(reason_of(device) == "loaded_onto_gpu");
  device.failure->requested_bytes = 30_MiB;
  CHECK(reason_of(device) == "logits");
}

TEST_CASE("many tensors that are there beside what they were cloned of are copies", "[explain][reasons]") {
  const LiveBlock original{.bytes = 16_MiB, .requested_bytes = 16_MiB, .made = {.op = "aten::to", .source = "a.py:3"}};
  LiveBlock clone = original;
  clone.made = {.op = "aten::clone", .source = "a.py:4"};
  std::vector<LiveBlock> blocks(8, original);
  blocks.insert(blocks.end(), 8, clone);
  CHECK(reason_of(at_oom(blocks)) == "several_models");
  blocks.resize(12);  // the last clones are gone
  CHECK(reason_of(at_oom(blocks)).empty());
}

TEST_CASE("torch.load that requests a weight's copy is the reason as it runs", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.requested_bytes = weight.bytes = 64_MiB;
  DeviceHistory device = at_oom({weight, weight, weight});
  device.failure->phase = Phase::other;
  CHECK(reason_of(device) == "loaded_onto_gpu");
  device.referrers = {
      {.variable = "dict 'optimizer.state' in main (train.py:1)", .storage_bytes = 128_MiB, .born = 1},
      {.variable = "dict 'model._parameters' in main (train.py:1)", .storage_bytes = 128_MiB, .born = 2},
      {.variable = "dict 'saved[\"model\"]' in main (train.py:1)", .storage_bytes = 64_MiB, .born = 3}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->kept_by == "dict 'saved[\"model\"]' in main (train.py:1)");
  CHECK(reason->how.back() == "del saved  # as soon as the model and the optimizer have it");
  device.failure->where.op = "aten::add";
  CHECK(reason_of(device) != "loaded_onto_gpu");
}

TEST_CASE("a request without an op that is as large as a tensor of the program comes from a file",
          "[explain][reasons]") {
  LiveBlock bank{.bytes = 240_MiB,
                 .requested_bytes = 240_MiB,
                 .category = Category::input,
                 .made = {.op = "aten::randn", .source = "bank.py:3"}};
  DeviceHistory device = at_oom({bank}, "/a/state.py:9 in load_state\n/a/train.py:40 in main");
  device.failure->phase = Phase::other;
  device.failure->requested_bytes = 240_MiB;
  CHECK(reason_of(device) != "loaded_onto_gpu");
  device.referrers = {
      {.variable = "attribute 'bank.features' in main (train.py:1)", .made = bank.made, .storage_bytes = 240_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text == "torch.load put tensors of a file onto the GPU at state.py:9: 240.00 MiB");
  device.failure->where.op = "aten::empty_like";
  CHECK(reason_of(device) != "loaded_onto_gpu");
}

TEST_CASE("weights that no variable leads to are kept by graphs of what their model made", "[explain][reasons]") {
  LiveBlock of_deleted = parameter("encoder.0.weight", false), of_model = parameter("decoder.0.weight", true);
  of_deleted.bytes = 200_MiB;
  of_deleted.made.source = "train.py:4";
  of_model.made.source = "train.py:30";
  DeviceHistory device = at_oom({of_deleted, of_model});
  device.state.reserved_bytes = device.state.allocated_bytes;
  device.looked_for_referrers = true;
  CHECK(reason_of(device) != "deleted_model");  // of no parameter a variable is known
  device.referrers = {{.variable = "list 'optimizer.param_groups' in main (train.py:1)", .made = of_model.made}};
  CHECK(find_reason({.device = device, .growths = {}})->fix == "collect_garbage");
  device.referrers.push_back({.variable = "variable 'embedding' in main (train.py:1)", .nodes = 50, .bytes = 4096});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "deleted_model");
  CHECK(reason->how.front().starts_with("embedding = embedding.detach()"));
  device.referrers.push_back({.variable = "dict 'encoder._parameters' in main (train.py:1)", .made = of_deleted.made});
  CHECK(reason_of(device) != "deleted_model");
}

TEST_CASE("weights that two steps have not used are on the GPU for nothing", "[explain][reasons]") {
  LiveBlock reward = parameter("reward.0.weight", false), policy = parameter("policy.0.weight", true);
  reward.bytes = 200_MiB;
  DeviceHistory device = at_oom({reward, policy});
  device.state.reserved_bytes = device.state.allocated_bytes;
  device.step_allocations = {.step = 5, .blocks = {graph_block("policy.0", 1_MiB)}};
  CHECK(reason_of(device) != "idle_model");  // it may be called later in this step
  device.complete = {.step = 4, .blocks = {graph_block("policy.0", 1_MiB)}};
  CHECK(reason_of(device) == "idle_model");
  device.complete.blocks.push_back(graph_block("reward.0", 1_MiB));
  CHECK(reason_of(device) != "idle_model");
}

TEST_CASE("a model that was moved as another one was is no copy of it", "[explain][reasons]") {
  LiveBlock weight = parameter("blocks.0.weight", false);
  weight.bytes = weight.requested_bytes = 100_MiB;
  const LiveBlock second{.bytes = 100_MiB,
                         .requested_bytes = 100_MiB,
                         .category = Category::input,
                         .made = {.op = "aten::to", .source = "load.py:9"}};
  DeviceHistory device = at_oom({weight, second, second});
  CHECK(find_reason({.device = device, .growths = {}})->fix == "copies_on_host");  // as of a state dict
  device.referrers = {{.variable = "dict 'aligner._modules[0]._parameters' in main (run.py:3)",
                       .made = second.made,
                       .storage_bytes = 100_MiB}};
  CHECK(find_reason({.device = device, .growths = {}})->fix == "drop_models");
}

TEST_CASE("a model that was never called is no original of which others are copies", "[explain][reasons]") {
  LiveBlock called = parameter("encoder.weight", true);
  called.bytes = called.requested_bytes = 1_MiB;
  LiveBlock uncalled{.bytes = 100_MiB,
                     .requested_bytes = 100_MiB,
                     .category = Category::parameter,
                     .made = {.op = "aten::to", .source = "load.py:9"},
                     .uncalled = true};
  DeviceHistory device = at_oom({called, uncalled, uncalled});
  CHECK(reason_of(device) != "several_models");
  device.state.blocks.front().bytes = device.state.blocks.front().requested_bytes = 100_MiB;
  CHECK(reason_of(device) == "several_models");
}

TEST_CASE("weights that are joined to new ones are there twice as long as the old ones stay", "[explain][reasons]") {
  LiveBlock expert = parameter("", false);
  expert.bytes = expert.requested_bytes = 40_MiB;
  expert.made = {.op = "aten::to", .source = "moe.py:3"};
  LiveBlock fused = expert;
  fused.made = {.op = "aten::stack", .source = "moe.py:9"};
  DeviceHistory device = at_oom({expert, expert, expert, fused, fused});
  device.failure->phase = Phase::setup;
  device.failure->where = fused.made;
  const auto reason = find_weight_copies({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "weights are joined to new ones at moe.py:9, 144.00 MiB, while those that they are made of are still there: "
        "120.00 MiB");
  device = at_oom({expert, fused, fused});  // the old ones are gone
  const auto other = find_weight_copies({.device = device, .growths = {}});
  CHECK((!other || !other->text.starts_with("weights are joined")));
}

TEST_CASE("a second copy of a weight, and a second model in the making, are models too many", "[explain][reasons]") {
  LiveBlock weight = parameter("embedding.weight", true);
  weight.bytes = weight.requested_bytes = 100_MiB;
  weight.made = {.op = "aten::empty", .source = "net.py:5"};
  LiveBlock other = weight;
  other.name = "head.weight";
  DeviceHistory device = at_oom({weight, other});
  device.failure->where = {.op = "aten::to", .source = "train.py:40"};
  device.failure->requested_bytes = 100_MiB;
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_models");
  CHECK(reason->text.starts_with(
      "weights go to the GPU at train.py:40 while the same are there: 100.00 MiB as large as"));
  device.failure->requested_bytes = 99_MiB;
  CHECK(reason_of(device) != "several_models");
  device.failure->where = {.op = "aten::empty", .source = "net.py:5"};
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_models");
  CHECK(reason->text.starts_with("another model of the same layers is made on the GPU at net.py:5"));
  device.failure->where.source = "net.py:6";
  CHECK(reason_of(device) != "several_models");
}

TEST_CASE("copies by copy.deepcopy are told from what a file's tensors are", "[explain][reasons]") {
  LiveBlock weight = parameter("embedding.weight", true);
  weight.bytes = weight.requested_bytes = 100_MiB;
  weight.made = {.op = "aten::to", .source = "net.py:5"};
  const LiveBlock copy{
      .bytes = 100_MiB, .requested_bytes = 100_MiB, .category = Category::unknown, .phase = Phase::other, .step = 3};
  DeviceHistory device = at_oom({weight, copy});
  device.failure->where = {.node = "MmBackward0"};
  device.failure->phase = Phase::backward;
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text == "torch.load, or copy.deepcopy of a state dict, put tensors onto the GPU in step 3: 100.00 MiB");
  CHECK(reason->how.back().starts_with("best = {name: w.detach().cpu()"));
  device.state.blocks.back().step = 0;
  device.state.blocks.back().phase = Phase::setup;
  CHECK(reason_of(device) == "loaded_onto_gpu");
  device.state.blocks.pop_back();
  device.failure->phase = Phase::setup;
  device.failure->where = {};
  device.failure->requested_bytes = 100_MiB;
  device.failure->stack = "/a/train.py:7 in main";
  CHECK(reason_of(device) == "loaded_onto_gpu");
  device.failure->copies_deeply = true;
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "copy.deepcopy makes tensors as large as the weights beside them on the GPU at train.py:7: 100.00 MiB");
}

}  // namespace oomdiag
