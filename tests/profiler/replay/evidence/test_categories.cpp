#include "profiler/explain/explain.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

Category category_of(const EventBuilder& trace, const std::string& block) {
  const History history = replay(trace);
  for (const LiveBlock& live : history.devices.at(0).state.blocks) {
    if (live.address == trace.address_of(block)) return live.category;
  }
  FAIL(block << " is not alive");
  return Category::unknown;
}

/// Makes the moment to describe: more is allocated than ever before.
EventBuilder& peak(EventBuilder& trace) { return trace.alloc("peak", 500_MiB); }

}  // namespace

TEST_CASE("what events name is a parameter, a buffer or a gradient, also if a node saves it", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::to"}).alloc("w", 4_MiB).alloc("running_mean", 4_MiB);
  trace.op({.op = "aten::conv2d"}).alloc("y", 4_MiB).nodes(0);
  trace.thread(2).node("ConvolutionBackward0", 0).walk().saved("w", "ConvolutionBackward0", 0);
  trace.names(EventKind::parameter, "w", "conv.weight").names(EventKind::buffer, "running_mean", "bn.running_mean");
  trace.op({.op = "aten::convolution_backward", .grad = false}).alloc("g", 4_MiB).end_node();
  trace.node("torch::autograd::AccumulateGrad", kAccumulateGrad).names(EventKind::gradient, "g", "").end_node();
  peak(trace.thread(1).op({.op = "aten::empty", .grad = false}));

  CHECK(category_of(trace, "w") == Category::parameter);
  CHECK(category_of(trace, "running_mean") == Category::buffer);
  CHECK(category_of(trace, "g") == Category::gradient);
}

TEST_CASE("a bucket in which DistributedDataParallel reduces gradients counts as these", "[replay]") {
  CHECK(categorise({.bucket = true, .phase = Phase::setup, .modules_known = true, .op = "aten::empty"}) ==
        Category::gradient);
}

TEST_CASE("parameters may be named after the peak", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::to"}).alloc("w", 4_MiB);
  peak(trace.op({.op = "aten::conv2d"})).nodes(0).names(EventKind::parameter, "w", "conv.weight");

  CHECK(category_of(trace, "w") == Category::parameter);
}

TEST_CASE("a gradient is in flight until it has been accumulated", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::conv2d"}).alloc("y", 4_MiB).nodes(0);
  trace.thread(2).node("ConvolutionBackward0", 0).op({.op = "aten::convolution_backward", .grad = false});
  trace.alloc("g", 4_MiB).op({.op = "aten::sum", .grad = false});
  peak(trace).end_node().node("torch::autograd::AccumulateGrad", kAccumulateGrad);
  trace.names(EventKind::gradient, "g", "");

  CHECK(category_of(trace, "g") == Category::activation_gradient);
}

TEST_CASE("what survives an optimizer step is its state", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 1_MiB).nodes(0).begin_scope("Optimizer.step#Adam.step");
  trace.op({.op = "aten::mul", .grad = false}).alloc("state", 4_MiB).end_scope("Optimizer.step#Adam.step");
  peak(trace.op({.op = "aten::relu"}));

  CHECK(category_of(trace, "state") == Category::optimizer_state);
}

TEST_CASE("inside an open optimizer step only ops that make state do so", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 1_MiB).nodes(0).begin_scope("Optimizer.step#Adam.step");
  trace.op({.op = "aten::zeros_like", .grad = false}).alloc("state", 4_MiB);
  trace.op({.op = "aten::_foreach_sqrt", .grad = false}).alloc("temporary", 4_MiB);
  peak(trace.op({.op = "aten::_foreach_div", .grad = false}));

  CHECK(category_of(trace, "state") == Category::optimizer_state);
  CHECK(category_of(trace, "temporary") == Category::temporary);
}

TEST_CASE("what the model computes in a closure of an optimizer's step is no state of it", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 1_MiB).nodes(0).begin_scope("Optimizer.step#LBFGS.step");
  trace.op({.op = "aten::relu", .module = "act"}).alloc("output", 4_MiB).nodes(1);
  trace.end_scope("Optimizer.step#LBFGS.step");
  peak(trace.op({.op = "aten::relu"}));

  CHECK(category_of(trace, "output") == Category::output);
}

TEST_CASE("a saved tensor is an activation, or an input where the graph begins", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::randn"}).alloc("from setup", 4_MiB);
  trace.op({.op = "aten::conv2d"}).alloc("y", 4_MiB).nodes(0);
  trace.op({.op = "aten::to"}).alloc("batch", 4_MiB);
  trace.op({.op = "Swish", .module = "act"}).alloc("in a Python function", 4_MiB);
  peak(trace.op({.op = "aten::relu"})).nodes(1).thread(2).node("ReluBackward0", 1).walk();
  for (const char* block : {"from setup", "y", "batch", "in a Python function"}) trace.saved(block, "ReluBackward0", 1);

  CHECK(category_of(trace, "from setup") == Category::input);
  CHECK(category_of(trace, "y") == Category::activation);
  CHECK(category_of(trace, "batch") == Category::input);
  CHECK(category_of(trace, "in a Python function") == Category::activation);
}

TEST_CASE("a tensor saved by several nodes is listed once, with all of them", "[replay]") {
  const Trace trace = training_that_fits();
  const MemoryState state = replay(trace).devices.at(0).state;

  std::vector<const LiveBlock*> saved;
  for (const LiveBlock& block : state.blocks) {
    if (block.category == Category::activation) saved.push_back(&block);
  }
  REQUIRE(saved.size() == 1);
  REQUIRE(saved[0]->saved_by.size() == 2);
  CHECK(saved[0]->saved_by[0].node == "ReluBackward0");
  CHECK(saved[0]->saved_by[1].op == "aten::mean");
  CHECK(saved[0]->shape == "[64, 32, 64, 128] float32");
}

TEST_CASE("products inside of an op that is a whole layer make results, and no workspace", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::_transformer_encoder_layer_fwd", .inner = "aten::addmm"}).alloc("qkv", 4_MiB);
  peak(trace.alloc("projection", 4_MiB)).free("projection").free("qkv");

  CHECK(category_of(trace, "projection") == Category::temporary);
}

TEST_CASE("a walk of an earlier backward pass says nothing about a later one", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("kept", 4_MiB).nodes(0);
  trace.node("ReluBackward0", 0).walk().saved("kept", "ReluBackward0", 0).alloc("g", 1_MiB).end_node();
  peak(trace.op({.op = "aten::relu"})).nodes(1);

  CHECK(category_of(trace, "kept") == Category::output);
}

TEST_CASE("a step that was not walked is explained by an earlier one like it", "[replay]") {
  EventBuilder trace;
  const SmallTraining training;
  training.setup(trace);
  training.forward(trace, 0);
  training.backward(trace, 0);
  training.optimizer(trace, true);
  training.zero_grad(trace);
  training.forward(trace, 3);
  trace.node("MeanBackward0", 5).op({.op = "aten::expand_div", .grad = false});
  peak(trace);

  const Trace& built = trace;
  const History history = replay(built);
  const MemoryState& state = history.devices.at(0).state;
  CHECK(state.step == 2);
  CHECK(state.saved_from_earlier_step);
  CHECK(category_of(trace, "relu1") == Category::activation);
  CHECK(category_of(trace, "input") == Category::input);
  CHECK(category_of(trace, "weight") == Category::parameter);
  CHECK(category_of(trace, "loss") == Category::output);
  for (const LiveBlock& block : state.blocks) {
    if (block.address != trace.address_of("relu1")) continue;
    REQUIRE(block.saved_by.size() == 2);
    CHECK(block.saved_by[0].module == "relu1");
    CHECK(block.shape == "[64, 32, 64, 128] float32");
  }
  const auto& step_allocations = history.devices.at(0).step_allocations.blocks;
  const auto relu = std::ranges::find(step_allocations, std::string_view("relu1"),
                                      [](const StepAllocation& b) { return b.made.module; });
  REQUIRE(relu != step_allocations.end());
  CHECK(relu->category == Category::activation);
  CHECK(relu->shape == "[64, 32, 64, 128] float32");
  REQUIRE(relu->saved_by.size() == 2);
  CHECK(relu->saved_by[0].module == "relu1");
}

TEST_CASE("what a forward op made and nobody saved is an output; a fresh batch is an input", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(0);
  trace.op({.op = "aten::to", .grad = false}).alloc("batch", 4_MiB);
  trace.op({.op = "aten::zeros", .module = "lstm", .grad = false}).alloc("hidden", 4_MiB);
  peak(trace.op({.op = "aten::relu"})).nodes(1);

  CHECK(category_of(trace, "y") == Category::output);
  CHECK(category_of(trace, "batch") == Category::input);
  CHECK(category_of(trace, "hidden") == Category::output);
}

TEST_CASE("between the steps of a program whose modules are known, a copy is an input and a result an output",
          "[replay]") {
  EventBuilder trace;
  trace.trace().process.python = true;
  trace.op({.op = "aten::to"}).alloc("weight", 4_MiB).names(EventKind::parameter, "weight", "head.weight");
  trace.op({.op = "aten::linear", .module = "head"}).alloc("logits", 4_MiB).nodes(0);
  trace.begin_scope("Optimizer.step#SGD.step").end_scope("Optimizer.step#SGD.step");
  trace.op({.op = "aten::to", .grad = false}).alloc("next batch", 4_MiB);
  trace.op({.op = "aten::softmax", .grad = false}).alloc("probabilities", 4_MiB);
  peak(trace.op({.op = "aten::relu", .grad = false}));

  CHECK(category_of(trace, "next batch") == Category::input);
  CHECK(category_of(trace, "probabilities") == Category::output);
}

TEST_CASE("what dies inside its op is a temporary, in a convolution its workspace", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::gelu"}).alloc("y", 1_MiB).nodes(0).op({.op = "aten::softmax"});
  trace.alloc("copy", 4_MiB).op({.op = "aten::conv2d", .inner = "aten::cudnn_convolution"}).nodes(1);
  trace.alloc("z", 4_MiB).alloc("workspace", 8_MiB);
  peak(trace).free("workspace");
  CHECK(category_of(trace, "workspace") == Category::workspace);
  CHECK(category_of(trace, "z") == Category::output);
  CHECK(category_of(trace, "copy") == Category::output);

  EventBuilder other;
  other.op({.op = "aten::softmax"}).nodes(0).alloc("copy", 4_MiB);
  peak(other).free("copy");
  CHECK(category_of(other, "copy") == Category::temporary);
}

TEST_CASE("in an op that failed the first block is its result, others are workspace or temporaries", "[replay]") {
  EventBuilder trace({.gpu_bytes = 200_MiB});
  trace.op({.op = "aten::relu"}).alloc("x", 1_MiB).nodes(0);
  trace.op({.op = "aten::conv2d", .inner = "aten::cudnn_convolution", .module = "conv"}).nodes(1);
  trace.alloc("y", 12_MiB).alloc("workspace", 12_MiB).oom(400_MiB).op_failed();

  CHECK(category_of(trace, "y") == Category::output);
  CHECK(category_of(trace, "workspace") == Category::workspace);
}

TEST_CASE("the workspace that cuBLAS keeps is known by its size; a thread and stream has one", "[replay]") {
  EventBuilder trace;
  trace.trace().devices[0].cublas_workspace_bytes = 32_MiB;
  trace.op({.op = "aten::linear", .inner = "aten::addmm"}).alloc("y", 32_MiB).alloc("workspace", 32_MiB).nodes(0);
  trace.op({.op = "aten::matmul", .inner = "aten::mm"}).alloc("a", 4_MiB).alloc("b", 32_MiB).nodes(1);
  peak(trace.op({.op = "aten::relu"})).nodes(2);

  CHECK(category_of(trace, "y") == Category::output);
  CHECK(category_of(trace, "workspace") == Category::workspace);
  CHECK(category_of(trace, "b") == Category::output);
}

TEST_CASE("where torch does not give the size of cuBLAS's workspace it is one of the defaults", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::linear", .inner = "aten::addmm"})
      .alloc("y", 4_MiB)
      .alloc("workspace", 8_MiB + (128 << 10))
      .nodes(0);
  trace.op({.op = "aten::matmul", .inner = "aten::mm"}).alloc("a", 4_MiB).alloc("b", 8_MiB).nodes(1);
  peak(trace.op({.op = "aten::relu"})).nodes(2);

  CHECK(category_of(trace, "workspace") == Category::workspace);
  CHECK(category_of(trace, "b") == Category::output);
}

TEST_CASE("without modules what is drawn is input, what is computed or left for a kernel to fill is output",
          "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::randn"}).alloc("x", 4_MiB);
  trace.op({.op = "aten::empty_like"}).alloc("out", 4_MiB);
  trace.op({.op = "aten::cat"}).alloc("cache", 4_MiB);
  for (const std::string op : {"aten::to", "aten::empty", "aten::zeros", "aten::clone"}) {
    trace.op({.op = op}).alloc(op, 4_MiB);  // as modules that are made, moved or loaded do
  }
  trace.op({.op = ""}).alloc("raw", 4_MiB);
  peak(trace);

  CHECK(category_of(trace, "x") == Category::input);
  CHECK(category_of(trace, "out") == Category::output);
  CHECK(category_of(trace, "cache") == Category::output);
  for (const std::string block : {"aten::to", "aten::empty", "aten::zeros", "aten::clone", "raw"}) {
    CHECK(category_of(trace, block) == Category::unknown);
  }
}

TEST_CASE("the rest is unknown, unless modules named all that is theirs", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::select"}).nodes(0);  // a view of a weight: training has not begun yet
  trace.op({.op = "aten::to"})
      .alloc("w", 4_MiB)
      .alloc("data set", 4_MiB)
      .op({.op = "aten::div"})
      .alloc("normalised", 4_MiB);
  peak(trace.op({.op = "aten::relu"})).nodes(1).names(EventKind::parameter, "w", "fc.weight");
  CHECK(category_of(trace, "data set") == Category::unknown);
  CHECK(category_of(trace, "normalised") == Category::output);

  trace.trace().process.python = true;
  CHECK(category_of(trace, "data set") == Category::input);
  CHECK(category_of(trace, "normalised") == Category::input);
}

TEST_CASE("categories add up to the allocated bytes in every scenario", "[replay]") {
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    const MemoryState state = replay(trace).devices.at(0).state;
    int64_t sum = 0;
    for (const int64_t bytes : sum_categories(state)) sum += bytes;
    CHECK(sum == state.allocated_bytes);
  }
}

}  // namespace oomdiag
