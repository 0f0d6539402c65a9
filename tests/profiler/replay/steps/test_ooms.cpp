#include "profiler/replay/replay.h"
#include "profiler/replay/steps/ooms.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

std::vector<Outcome> outcomes(const Trace& trace, std::optional<bool> survived = {}) {
  std::vector<Outcome> result;
  for (const DeviceHistory& device : replay(trace, survived).devices) {
    for (const OutOfMemory& oom : device.ooms) result.push_back(oom.outcome);
  }
  return result;
}

void convolution_that_copes(EventBuilder& trace, bool needs_workspace) {
  trace.op({.op = "aten::conv2d", .inner = "aten::cudnn_convolution", .module = "conv1"}).alloc("y", 4_MiB).nodes(0);
  trace.oom(100_MiB, false).oom(50_MiB, false);
  if (needs_workspace) trace.alloc("workspace", 2_MiB).free("workspace");
}

}  // namespace

TEST_CASE("an OOM after which its op goes on was recovered by a library", "[replay]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  convolution_that_copes(trace, true);

  CHECK(outcomes(trace) == std::vector{Outcome::recovered, Outcome::recovered});
}

TEST_CASE("an OOM after which another op begins, with no failure in between, was recovered too", "[replay]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  convolution_that_copes(trace, false);
  trace.op({.op = "aten::relu"}).alloc("z", 4_MiB);

  CHECK(outcomes(trace) == std::vector{Outcome::recovered, Outcome::recovered});
}

TEST_CASE("the workspace that an op went on with is distinguished from the blocks that stay", "[replay]") {
  const auto granted = [](const Trace& trace) {
    std::vector<int64_t> result;
    const auto devices = replay(trace).devices;
    for (const OutOfMemory& oom : devices.at(0).ooms) result.push_back(oom.granted_bytes);
    return result;
  };
  EventBuilder trace({.gpu_bytes = 40_MiB});
  convolution_that_copes(trace, true);
  CHECK(granted(trace) == std::vector<int64_t>{2_MiB, 2_MiB});

  EventBuilder without({.gpu_bytes = 40_MiB});
  convolution_that_copes(without, false);
  without.alloc("dw", 2_MiB).oom(100_MiB, false).alloc("workspace", 1_MiB).free("workspace").free("dw");
  CHECK(granted(without) == std::vector<int64_t>{0, 0, 1_MiB});
}

TEST_CASE("an OOM that leaves its op is fatal if training never goes on", "[replay]") {
  CHECK(outcomes(oom_in_backward()) == std::vector{Outcome::fatal});
  CHECK(outcomes(oom_in_forward()) == std::vector{Outcome::fatal});
  CHECK(outcomes(oom_in_optimizer()) == std::vector{Outcome::fatal});  // its scope ends while unwinding
}

TEST_CASE("an OOM that leaves its op was caught if training goes on", "[replay]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(0);
  trace.op({.op = "aten::conv2d"}).nodes(1).oom(100_MiB).nodes(2).op_failed();  // its own nodes are no progress
  CHECK(outcomes(trace) == std::vector{Outcome::fatal});

  trace.op({.op = "aten::conv2d"}).alloc("z", 4_MiB);
  CHECK(outcomes(trace) == std::vector{Outcome::fatal});

  trace.nodes(3);
  CHECK(outcomes(trace) == std::vector{Outcome::caught});
}

TEST_CASE("without gradients an OOM was caught if modules run again, or many other allocations follow", "[replay]") {
  EventBuilder trace({.gpu_bytes = 400_MiB});
  trace.op({.op = "aten::linear", .module = "fc", .grad = false}).alloc("y", 4_MiB).oom(500_MiB).op_failed();
  CHECK(outcomes(trace) == std::vector{Outcome::fatal});

  EventBuilder modules({.gpu_bytes = 400_MiB});
  modules.op({.op = "aten::linear", .module = "fc", .grad = false}).oom(500_MiB).op_failed();
  modules.op({.op = "aten::linear", .module = "fc", .grad = false}).alloc("y", 4_MiB);
  CHECK(outcomes(modules, false) == std::vector{Outcome::caught});

  EventBuilder handler({.gpu_bytes = 400_MiB});  // except RuntimeError: if index.min() < 0: …; raise
  handler.op({.op = "aten::index_select", .module = "conv", .grad = false}).oom(500_MiB).op_failed();
  handler.op({.op = "aten::min", .module = "conv", .grad = false}).alloc("least", 512).free("least");
  CHECK(outcomes(handler, false) == std::vector{Outcome::fatal});

  EventBuilder plain({.gpu_bytes = 400_MiB});
  plain.no_op().oom(500_MiB);
  for (int i = 0; i < 60; ++i) plain.no_op().alloc("x", 1_MiB).free("x");
  CHECK(outcomes(plain, false) == std::vector{Outcome::fatal});
  for (int i = 0; i < 10; ++i) plain.no_op().alloc("x", 1_MiB).free("x");
  CHECK(outcomes(plain, false) == std::vector{Outcome::caught});
}

TEST_CASE("the exit status overrules the guess", "[replay]") {
  CHECK(outcomes(oom_in_backward(), true) == std::vector{Outcome::caught});
  CHECK(outcomes(oom_in_backward(), false) == std::vector{Outcome::fatal});
}

TEST_CASE("of several OOMs without progress only the last ended the program", "[replay]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(0);
  trace.op({.op = "aten::empty"}).oom(100_MiB).op_failed().op({.op = "aten::empty"}).oom(50_MiB).op_failed();

  CHECK(outcomes(trace) == std::vector{Outcome::caught, Outcome::fatal});
}

TEST_CASE("outside of any op nothing recovers from an OOM", "[replay]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  trace.no_op().alloc("a", 4_MiB).oom(100_MiB).alloc("b", 1_MiB);
  CHECK(outcomes(trace) == std::vector{Outcome::fatal});
  CHECK(outcomes(trace, true) == std::vector{Outcome::caught});
}

TEST_CASE("an OOM that is the last thing in the trace is decided by the exit status", "[replay]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  convolution_that_copes(trace, false);
  CHECK(outcomes(trace) == std::vector{Outcome::recovered, Outcome::fatal});
  CHECK(outcomes(trace, true) == std::vector{Outcome::recovered, Outcome::recovered});
}

TEST_CASE(
    "only convolutions and libraries recover from an OOM: an op of which no failure was seen was left by it all the "
    "same",
    "[replay]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  trace.op({.op = "aten::scaled_dot_product_attention", .inner = "aten::bmm", .module = "attention"}).oom(100_MiB);
  CHECK(outcomes(trace, true) == std::vector{Outcome::caught});
  CHECK(outcomes(trace, false) == std::vector{Outcome::fatal});
  trace.op({.op = "aten::linear", .module = "fc"}).alloc("y", 4_MiB).nodes(1);
  CHECK(outcomes(trace) == std::vector{Outcome::caught});
}

TEST_CASE("a failure holds what is known of the request", "[replay]") {
  const Trace trace = oom_in_backward();
  const DeviceHistory device = replay(trace).devices.at(0);

  REQUIRE(device.failure);
  CHECK(device.failure->phase == Phase::backward);
  CHECK(device.failure->step == 1);
  CHECK(device.failure->where.node == "ReluBackward0");
  CHECK(device.failure->where.op == "aten::relu");
  CHECK(device.failure->where.module == "relu1");
  CHECK(device.failure->requested_bytes == 64_MiB);
  CHECK(device.failure->requested_shape == "[64, 32, 64, 128] float32");
  CHECK(device.failure->requested_gradient_of.module == "conv1");
  CHECK(device.failure->first_in_op);
}

}  // namespace oomdiag
