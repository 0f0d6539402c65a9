#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of reason_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("an exception that is kept keeps the frames of its traceback", "[explain][reasons]") {
  const Growth growth{.kind = GrowthKind::kept_tensors,
                      .grown_bytes = 90_MiB,
                      .referrer = "dict 'optimizer.state' in fit(), whose frame the traceback in 'failed' keeps"};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const auto reason = find_reason({.device = device, .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->id == "caught_traceback");
  CHECK(reason->text ==
        "exceptions are kept in 'failed': the traceback of each keeps the frames of its calls, and 90.00 MiB of "
        "tensors in "
        "their variables");
}

TEST_CASE("logits are whole rows of the vocabulary, which a tall parameter tells", "[explain][reasons]") {
  const LiveBlock head{.bytes = 32_MiB, .category = Category::parameter, .shape = "[64000, 256] bfloat16"};
  const int64_t bytes = int64_t{2560} * 64000 * 2;
  const LiveBlock logits{.bytes = bytes, .requested_bytes = bytes, .category = Category::output};
  DeviceHistory device = at_oom({head, logits});
  device.failure->requested_bytes = 2 * bytes;  // their copy in float32
  device.failure->where = {.op = "aten::to", .source = "train.py:9"};
  CHECK(reason_of(device) == "logits");
  device.state.blocks.erase(device.state.blocks.begin());
  CHECK(reason_of(device) == "large_cast");
}

TEST_CASE("an error that was caught before is the reason where as much is still alive", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 400_MiB, .category = Category::unknown}});
  device.failure->event = 9;
  device.failure->allocated_bytes = 400_MiB;
  device.ooms = {{.event = 3, .outcome = Outcome::caught, .allocated_bytes = 450_MiB}};
  CHECK(reason_of(device) == "caught_traceback");
  device.ooms.front().outcome = Outcome::recovered;
  CHECK(reason_of(device).empty());
}

TEST_CASE("weights of other models and counts of pairs of classes are no logits", "[explain][reasons]") {
  LiveBlock table = parameter("embed.weight", false);
  table.shape = "[16000, 256] float32";
  table.requested_bytes = table.bytes = 16000 * 256 * 4;
  LiveBlock other = table;
  other.category = Category::input;
  other.name = other.shape = {};
  other.made = {.op = "aten::to", .source = "translate.py:3"};
  DeviceHistory device = at_oom({table, other, other, other, other});
  device.attribution.backward_bytes = 0;
  device.failure->where = {.op = "aten::linear", .module = "rnn", .source = "translate.py:9"};
  CHECK(reason_of(device) == "logits");  // of whom they are is not known
  device.referrers = {{.variable = "dict 'models[*]._modules[\"embed\"]._parameters' in main (translate.py:1)",
                       .made = other.made,
                       .storage_bytes = other.requested_bytes}};
  CHECK(reason_of(device) != "logits");

  DeviceHistory counts = at_oom({table});
  counts.failure->where = {.op = "aten::bincount", .module = "Accuracy", .source = "metric.py:9"};
  counts.failure->requested_bytes = int64_t{16000} * 16000 * 8;
  CHECK(reason_of(counts) != "logits");
}

TEST_CASE("the last segment of checkpoint_sequential is not checkpointed", "[explain][reasons]") {
  const auto device = at_oom({kept_activation(200_MiB, 5)},
                             "/a/net.py:9 in forward\nsite-packages/torch/utils/checkpoint.py:790 in "
                             "checkpoint_sequential\n/a/train.py:90 in main");
  CHECK(reason_of(device) == "one_checkpoint");
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

TEST_CASE("what an optimizer's step makes beside one large weight is named", "[explain][reasons]") {
  LiveBlock table = parameter("table", true), temporary{.bytes = 100_MiB, .requested_bytes = 100_MiB};
  table.bytes = table.requested_bytes = 100_MiB;
  temporary.category = Category::temporary;
  temporary.phase = Phase::optimizer;
  DeviceHistory device = at_oom({table, table, temporary});
  device.failure->phase = Phase::optimizer;
  device.failure->requested_bytes = 100_MiB;
  device.failure->where = {.op = "aten::div", .source = "train.py:95"};
  const auto reason = find_optimizer_temporaries({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "the optimizer's step makes 2 tensors as large as table, [512, 512] float32, 200.00 MiB in all, above the "
        "weight, "
        "its gradient and its state (aten::div at train.py:95)");
  device.failure->requested_bytes = 50_MiB;
  CHECK_FALSE(find_optimizer_temporaries({.device = device, .growths = {}}));
}

TEST_CASE("checkpointing that is asked for and does not happen is said", "[explain][reasons]") {
  DeviceHistory device = at_oom(std::vector<LiveBlock>(3, kept_activation(100_MiB, 5)));
  const auto is_named = [&] { return reason_of(device) == "checkpoints_without_effect"; };
  CHECK_FALSE(is_named());
  device.failure->asks_for_checkpoints = device.failure->modules_evaluate = true;
  CHECK(is_named());
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "checkpointing has no effect: a layer's attribute asks for it, and the model is in evaluation mode, but "
        "nothing is "
        "checkpointed, and 300.00 MiB of activations are kept at net.py:9");
  device.packed_tensors = 1;  // as checkpoint() packs them
  CHECK_FALSE(is_named());
  device.packed_tensors = 0;
  device.failure->stack = "/a/net.py:9 in forward\nsite-packages/torch/utils/checkpoint.py:400 in checkpoint";
  CHECK_FALSE(is_named());
}

TEST_CASE("a gradient that autograd copies is one that something else refers to", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 100_MiB, .category = Category::activation_gradient}});
  device.failure->phase = Phase::backward;
  device.failure->where = {.node = "torch::autograd::AccumulateGrad", .op = "aten::new_empty_strided"};
  CHECK(reason_of(device) == "copied_gradient");
  device.failure->where.node = "AddBackward0";
  CHECK(reason_of(device) != "copied_gradient");
}

TEST_CASE("CUDA graphs hold memory by a pool for each, or by sizes that serve no larger one", "[explain][reasons]") {
  DeviceHistory device = at_oom({});
  device.state.allocated_bytes = 100_MiB;
  for (const int64_t mib : {2, 20, 40, 60}) device.state.segments.push_back({.bytes = mib << 20, .pool = 1});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "private_pools");
  CHECK(reason->text ==
        "the private memory pool of CUDA graphs holds 122.00 MiB in 4 segments of up to 60.00 MiB: a graph reuses what "
        "those captured before it needed only where it needs no more");
  device.state.segments.pop_back();
  CHECK(reason_of(device).empty());
  device.state.segments.push_back({.bytes = 60_MiB, .pool = 2});
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "2 private memory pools of CUDA graphs hold 122.00 MiB, each for itself");
}

TEST_CASE("rows of a graph that are as large as logits by chance are none", "[explain][reasons]") {
  LiveBlock table = parameter("embedding.weight", true);
  table.shape = "[10000, 64] float32";
  LiveBlock nodes = kept_activation(100_MiB, 5);
  nodes.requested_bytes = int64_t{10000} * 2 * 4096;
  nodes.shape = "[10000, 4096] float16";
  DeviceHistory device = at_oom({table, nodes});
  device.step_allocations = {.step = 5, .blocks = {graph_block("conv", 100_MiB)}};
  device.failure->requested_bytes = int64_t{1'400'000} * 64 * 4;
  device.failure->where = {.op = "aten::index", .module = "conv", .source = "net.py:5"};
  CHECK(reason_of(device) != "logits");
  device.state.blocks[1].shape = "[4096, 10000] float16";
  device.state.blocks[1].bytes = 400_MiB;
  device.state.allocated_bytes += 300_MiB;
  device.failure->where = {.op = "aten::linear", .module = "head", .source = "net.py:9"};
  CHECK(reason_of(device) == "logits");
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
