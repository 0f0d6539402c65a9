#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of torch_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("the last segment of checkpoint_sequential is not checkpointed", "[explain][reasons]") {
  const auto device = at_oom({kept_activation(200_MiB, 5)},
                             "/a/net.py:9 in forward\nsite-packages/torch/utils/checkpoint.py:790 in "
                             "checkpoint_sequential\n/a/train.py:90 in main");
  CHECK(reason_of(device) == "one_checkpoint");
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

}  // namespace oomdiag
