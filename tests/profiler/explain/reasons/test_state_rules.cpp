#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of state_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

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

TEST_CASE("gradients of what no optimizer trains are named where they are more than those that are needed",
          "[explain][reasons]") {
  LiveBlock trained = parameter("lora.weight", true), frozen = parameter("base.weight", false);
  frozen.bytes = 100_MiB;
  LiveBlock gradient{.bytes = 100_MiB, .category = Category::gradient};
  CHECK(reason_of(at_oom({trained, frozen, gradient})) == "gradients_of_frozen");
  trained.bytes = 90_MiB;
  CHECK(reason_of(at_oom({trained, frozen, gradient})) != "gradients_of_frozen");
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

TEST_CASE("a model that goes to the GPU beside the one in training leaves that one there", "[explain][reasons]") {
  LiveBlock before = parameter("layers.0.weight", true), state{.bytes = 200_MiB, .category = Category::optimizer_state};
  before.bytes = 100_MiB;
  const auto reason = find_reason({.device = while_moving({before, state}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->fix == "model_on_host");
  CHECK(reason->text.find("beside the one in training") != std::string::npos);
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

TEST_CASE("a model of the same layers may have gone to the GPU by the same line", "[explain][reasons]") {
  LiveBlock before = parameter("layers.0.weight", true);
  before.bytes = before.requested_bytes = 40_MiB;
  before.made = {.op = "aten::to", .source = "load.py:9"};
  std::vector<LiveBlock> weights;
  for (const char* const name : {"a.weight", "b.weight", "c.weight", "d.weight", "e.weight", "f.weight", "g.weight",
                                 "h.weight", "i.weight", "j.weight"}) {
    before.name = name;
    weights.push_back(before);
  }
  DeviceHistory device = while_moving(weights);
  for (LiveBlock& block : device.state.blocks) {
    if (block.category == Category::input) block.category = Category::unknown;
  }
  device.failure->requested_bytes = 40_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(
      reason->text ==
      "another model of the same layers goes to the GPU at load.py:9, while the one before is still there: 200.00 MiB "
      "beside 400.00 MiB of parameters");
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
  device.failure->stack = "/a/load.py:9 in export_onnx\n/a/load.py:30 in main";
  CHECK(
      find_reason({.device = device, .growths = {}})->how.front().starts_with("model.cpu()  # export_onnx() can work"));
  device.failure->where.source = "train.py:9";  // a batch
  CHECK(reason_of(device) != "weights_do_not_fit");
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
