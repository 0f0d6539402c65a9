#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of model_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("a model that nothing has called is named by its variable", "[explain][reasons]") {
  const LiveBlock weight{.bytes = 80_MiB,
                         .requested_bytes = 80_MiB,
                         .category = Category::input,
                         .made = {.op = "aten::to", .source = "a.py:3"}};
  DeviceHistory device = at_oom({weight});
  device.state.free_bytes = 64_MiB;
  device.state.reserved_bytes = 80_MiB;
  device.failure->where = {.op = "aten::silu", .module = "down.1"};
  CHECK(reason_of(device).empty());
  device.referrers = {{.variable = "dict 'net._modules[0]._parameters' in main (a.py:9)",
                       .made = weight.made,
                       .storage_bytes = weight.requested_bytes}};
  CHECK(reason_of(device) == "idle_model");
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "net went to the GPU at a.py:3, and none of its layers has been called so far: 80.00 MiB");
  device.failure->where = {.op = "aten::to"};  // while models go to the GPU, none has been called
  CHECK(reason_of(device).empty());
  device.failure->where = {.op = "aten::silu", .module = "down.1"};
  device.state.blocks.push_back({.bytes = 1_MiB, .category = Category::parameter, .made = weight.made});
  CHECK(reason_of(device).empty());  // one of its layers was called by itself
}

TEST_CASE("more states than an optimizer makes are those of an earlier one", "[explain][reasons]") {
  const auto state = [](uint32_t step) {
    return LiveBlock{.bytes = 20_MiB,
                     .requested_bytes = 20_MiB,
                     .category = Category::optimizer_state,
                     .step = step,
                     .made = {.op = "aten::zeros_like", .source = "adam.py:3"}};
  };
  LiveBlock weight = state(0);
  weight.category = Category::parameter;
  weight.made = {};
  DeviceHistory device = at_oom({weight, state(1), state(1), state(5)});
  device.failure->phase = Phase::optimizer;
  device.failure->requested_bytes = 20_MiB;
  device.referrers = {{.variable = "dict 'trainer.optimizers[0].state' in fit (a.py:3)",
                       .made = state(1).made,
                       .storage_bytes = 20_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "earlier_optimizer");
  CHECK(reason->how.front().starts_with("trainer.optimizers = None"));
  device.state.blocks.pop_back();  // the second state of the only optimizer is the failing request
  device.state.blocks.pop_back();
  CHECK(reason_of(device) != "earlier_optimizer");
}

TEST_CASE("layers of one model that went to the GPU one by one are no models", "[explain][reasons]") {
  const Where moved{.op = "aten::to", .source = "eval.py:5"};
  std::vector<LiveBlock> blocks;
  DeviceHistory device;
  for (uint64_t layer = 0; layer < 4; ++layer) {
    blocks.push_back({.bytes = 50_MiB,
                      .requested_bytes = 50_MiB,
                      .category = Category::parameter,
                      .born = 10 * layer + 1,
                      .made = moved,
                      .name = "fc1.weight",
                      .shape = "[3072, 768] float32"});
  }
  blocks.push_back({.bytes = 1_MiB,
                    .category = Category::output,
                    .born = 5,
                    .made = {.op = "aten::linear", .module = "fc1", .source = "net.py:5"}});
  device = at_oom(std::move(blocks));
  device.referrers = std::vector<Referrer>(
      4, {.variable = "dict 'model._modules[\"layers\"]._modules[0]._parameters' in main (eval.py:9)", .made = moved});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "4 layers of model went to the GPU one after another at eval.py:5, and none went back: 200.00 MiB");
  CHECK(reason->how.front().starts_with("layer.cpu()"));
}

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

TEST_CASE("models of which variables lead to one at most are reference cycles", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = 50_MiB;
  weight.made = {.op = "aten::to", .source = "folds.py:3"};
  DeviceHistory device = at_oom({weight, weight, weight});
  CHECK(reason_of(device) == "several_models");
  device.looked_for_referrers = true;
  device.referrers = {{.variable = "dict 'net._parameters' in folds.py", .made = weight.made}};
  CHECK(reason_of(device) == "reference_cycle");
  device.referrers = std::vector<Referrer>(3, device.referrers.front());
  CHECK(reason_of(device) == "several_models");
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

TEST_CASE("gradients of what no optimizer trains are named where they are more than those that are needed",
          "[explain][reasons]") {
  LiveBlock trained = parameter("lora.weight", true), frozen = parameter("base.weight", false);
  frozen.bytes = 100_MiB;
  LiveBlock gradient{.bytes = 100_MiB, .category = Category::gradient};
  CHECK(reason_of(at_oom({trained, frozen, gradient})) == "gradients_of_frozen");
  trained.bytes = 90_MiB;
  CHECK(reason_of(at_oom({trained, frozen, gradient})) != "gradients_of_frozen");
}

TEST_CASE("a cache of a function's results is named where it keeps models", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = 50_MiB;
  DeviceHistory device = at_oom({weight, weight});
  device.referrers = {{.variable = "lru_cache of 'load' in train.py"}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_models");
  CHECK(reason->how.front().find("cache_clear()") != std::string::npos);
}

TEST_CASE("a model is too large by itself, or by one layer", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = weight.requested_bytes = 150_MiB;
  weight.group = "AdamW, group 1";
  LiveBlock gradient = weight;
  gradient.category = Category::gradient;
  DeviceHistory device = at_oom({weight, gradient});
  device.failure->phase = Phase::optimizer;
  device.state.free_bytes = 2_GiB;  // of which something else has most
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "model_states");
  CHECK(reason->text.starts_with("the model itself: 150.00 MiB of parameters"));
  CHECK(reason->text.find("150.00 MiB of gradients and ") != std::string::npos);
  CHECK(find_reason({.device = device, .growths = {}, .cause = CauseKind::fraction_cap})->id == "fraction_cap");
  device.state.blocks.front().shape = "[64, 614400] float32";
  CHECK(reason_of(device) == "large_layer");
}

TEST_CASE("weights, gradients and state that cannot fit together are the reason, whatever the batch",
          "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = 100_MiB;
  weight.group = "AdamW, group 1";
  DeviceHistory device = at_oom({weight, kept_activation(250_MiB, 1)});
  device.failure->step = 1;
  device.state.free_bytes = 399_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "model_states");
  CHECK(reason->text ==
        "whatever the batch, the model itself takes 400.00 MiB in its first step: 100.00 MiB of parameters, 100.00 MiB "
        "of gradients and 200.00 MiB of AdamW's state");
  device.state.free_bytes = 400_MiB;
  CHECK(reason_of(device) != "model_states");
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

TEST_CASE("a model that goes to the GPU beside the one in training leaves that one there", "[explain][reasons]") {
  LiveBlock before = parameter("layers.0.weight", true), state{.bytes = 200_MiB, .category = Category::optimizer_state};
  before.bytes = 100_MiB;
  const auto reason = find_reason({.device = while_moving({before, state}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->fix == "model_on_host");
  CHECK(reason->text.find("beside the one in training") != std::string::npos);
}

TEST_CASE("of a model that is gone no shape is known, and its parameters are twins all the same",
          "[explain][reasons]") {
  LiveBlock now = parameter("layers.0.weight", true), gone = parameter("layers.0.weight", true);
  now.bytes = gone.bytes = now.requested_bytes = gone.requested_bytes = 100_MiB;
  gone.shape = {};
  const auto reason = find_several_models({.device = at_oom({now, gone}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("2 models of the same layers are alive"));
  CHECK(reason->piles_up);
}

TEST_CASE("a model that goes to the GPU beside the one before is one too many", "[explain][reasons]") {
  LiveBlock before = parameter("layers.0.weight", false);
  before.bytes = 300_MiB;
  const DeviceHistory device = while_moving({before});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_models");
  CHECK(reason->text ==
        "another model goes to the GPU at load.py:9, 'model', while the one before is still there: 160.00 MiB of it so "
        "far "
        "beside 300.00 MiB of parameters, gradients and optimizer state");
}

TEST_CASE("two models of the same layers that nothing has called are told apart by their variables",
          "[explain][reasons]") {
  DeviceHistory device = while_moving({});
  const Where made{.op = "aten::to", .source = "load.py:9"};
  device.referrers = {
      {.variable = "dict 'app.model._parameters' in serve (a.py:3)", .made = made, .storage_bytes = 40_MiB},
      {.variable = "dict 'app.model._parameters' in serve (a.py:3)", .made = made, .storage_bytes = 8_MiB},
      {.variable = "dict 'app.model._parameters' in serve (a.py:3)", .made = made, .storage_bytes = 40_MiB},
      {.variable = "dict 'Net._parameters' in load.py", .made = made, .storage_bytes = 40_MiB},
      {.variable = "dict 'Net._parameters' in load.py", .made = made, .storage_bytes = 8_MiB}};
  const auto reason = find_moved_model({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "another model of the same layers goes to the GPU at load.py:9, while 'app.model' is still there: 48.00 MiB of "
        "it so "
        "far beside 88.00 MiB");
  device.referrers.back().storage_bytes = 9_MiB;  // other layers
  CHECK_FALSE(find_moved_model({.device = device, .growths = {}}));
}

TEST_CASE("the list that has several models is named", "[explain][reasons]") {
  LiveBlock weight = parameter("layers.0.weight", true);
  weight.bytes = weight.requested_bytes = 100_MiB;
  weight.made = {.op = "aten::to", .source = "folds.py:30"};
  DeviceHistory device = at_oom({weight, weight});
  device.referrers.assign(
      2, {.variable = "dict 'models[*]._parameters' in folds.py", .made = weight.made, .storage_bytes = 100_MiB});
  const auto reason = find_several_models({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->kept_by == "list 'models'");
  CHECK(reason->how.front().starts_with("models.append(model.cpu())"));
}

TEST_CASE("weights that do not fit by themselves are named with their type", "[explain][reasons]") {
  DeviceHistory device = while_moving({});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "weights_do_not_fit");
  CHECK(
      reason->text ==
      "the weights alone do not fit: 160.00 MiB of 'model' have come to the GPU at load.py:9, as float32, and more are "
      "to come");
  CHECK(reason->how.empty());
  for (LiveBlock& block : device.state.blocks) block.shape = "[10, 10] bfloat16";
  CHECK(find_reason({.device = device, .growths = {}})->how.front().find("device_map") != std::string::npos);
  device.failure->where.source = "train.py:9";  // a batch
  CHECK(reason_of(device) != "weights_do_not_fit");
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

TEST_CASE("where no kind of tensor has most of it, the model and its data are named", "[explain][reasons]") {
  LiveBlock weight = parameter("encoder.weight", true), head = parameter("head.weight", true);
  weight.bytes = 80_MiB, head.bytes = 10_MiB;
  const LiveBlock input{.bytes = 60_MiB,
                        .requested_bytes = 60_MiB,
                        .category = Category::input,
                        .made = {.op = "aten::to", .source = "a.py:3"},
                        .shape = "[1000, 100] float32"};
  DeviceHistory device = at_oom({weight, head, input});
  device.attribution.backward_bytes = 0;
  device.failure->where = {.op = "aten::linear", .module = "head", .source = "a.py:9"};
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "whole_step");
  CHECK(
      reason->text ==
      "the model and its data together: 90.00 MiB of parameters, which get gradients and the optimizer's state in this "
      "step, and 124.00 MiB of data and what layers make of it; most of the parameters are of 'encoder', 80.00 MiB, "
      "which is trained");
  device.state.blocks = {input, input, input, head};
  device.referrers = {{.variable = "variable 'x' in forward (a.py:2)", .made = input.made, .storage_bytes = 60_MiB}};
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(
      reason->text ==
      "one step works on all of variable 'x' in forward (a.py:2), [1000, 100] float32 at once: 244.00 MiB of data and "
      "what layers make of it");
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

TEST_CASE("weights of a model that is being made on the GPU do not fit by themselves", "[explain][reasons]") {
  std::vector<LiveBlock> weights;
  for (int i = 0; i < 10; ++i) {
    const int64_t bytes = i % 2 == 0 ? 20_MiB : 40_MiB;
    weights.push_back({.bytes = bytes, .requested_bytes = bytes, .made = {.op = "aten::empty", .source = "chat.py:7"}});
  }
  DeviceHistory device = at_oom(weights, "/v/models/llama.py:160 in __init__\n/a/chat.py:7 in main");
  device.failure->phase = Phase::setup;
  device.failure->where = {.op = "aten::empty", .source = "chat.py:7"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "weights_do_not_fit");
  CHECK(reason->text ==
        "the weights alone do not fit: 300.00 MiB of a model have been made on the GPU at chat.py:7, and more are to "
        "come");
  device.failure->stack = "/a/chat.py:7 in make_buffers";
  CHECK(reason_of(device) != "weights_do_not_fit");
}

}  // namespace oomdiag
