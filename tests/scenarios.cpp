#include "tests/scenarios.h"

namespace oomdiag {
namespace {

constexpr int64_t kParameterBytes = 4_MiB;
constexpr const char* kWeightShape = "[1024, 1024] float32";

void describe_graph(EventBuilder& trace, uint64_t node, const std::string& shape) {
  trace.saved("input", "ConvolutionBackward0", node, shape)
      .saved("weight", "ConvolutionBackward0", node, kWeightShape)
      .saved("relu1", "ReluBackward0", node + 1, shape)
      .saved("relu1", "MeanBackward0", node + 2, shape)
      .names(EventKind::parameter, "weight", "conv1.weight", kWeightShape);
}

}  // namespace

void SmallTraining::setup(EventBuilder& trace) const {
  trace.op({.op = "aten::to", .source = "train.py:5"}).alloc("weight", kParameterBytes);
  trace.no_op();
}

void SmallTraining::forward(EventBuilder& trace, uint64_t first_node) const {
  trace.op({.op = "aten::randn", .source = "train.py:9"}).alloc("input", activation_bytes);
  trace.op({.op = "aten::conv2d", .inner = "aten::cudnn_convolution", .module = "conv1", .source = "train.py:10"})
      .alloc("conv1", activation_bytes)
      .alloc("workspace", 10_MiB)
      .free("workspace")
      .nodes(first_node);
  trace.op({.op = "aten::relu", .module = "relu1", .source = "train.py:11"})
      .alloc("relu1", activation_bytes)
      .nodes(first_node + 1);
  trace.no_op().free("conv1");
  trace.op({.op = "aten::mean", .source = "train.py:12"}).alloc("loss", 4).nodes(first_node + 2);
  trace.no_op();
}

void SmallTraining::backward(EventBuilder& trace, uint64_t first_node) const {
  trace.thread(2).node("MeanBackward0", first_node + 2).walk();
  describe_graph(trace, first_node, shape);
  trace.op({.op = "aten::expand_div", .grad = false}).alloc("grad_relu1", activation_bytes).end_node();
  trace.node("ReluBackward0", first_node + 1);
  trace.op({.op = "aten::threshold_backward", .grad = false}).alloc("grad_conv1", activation_bytes);
  trace.no_op().free("grad_relu1").end_node().free("relu1");
  trace.node("ConvolutionBackward0", first_node);
  trace.op({.op = "aten::convolution_backward", .grad = false}).alloc("grad_weight", kParameterBytes);
  trace.no_op().free("grad_conv1").end_node();
  trace.node("torch::autograd::AccumulateGrad", kAccumulateGrad);
  trace.names(EventKind::gradient, "grad_weight", "", kWeightShape).end_node();
  trace.thread(1).free("input").free("loss");
}

void SmallTraining::optimizer(EventBuilder& trace, bool first) const {
  trace.begin_scope("Optimizer.step#Adam.step");
  if (first) {
    trace.op({.op = "aten::zeros_like", .grad = false}).alloc("exp_avg", kParameterBytes);
    trace.op({.op = "aten::zeros_like", .grad = false}).alloc("exp_avg_sq", kParameterBytes);
  }
  trace.op({.op = "aten::_foreach_sqrt", .grad = false}).alloc("denominator", kParameterBytes);
  trace.op({.op = "aten::_foreach_addcdiv_", .grad = false}).no_op().free("denominator");
  trace.end_scope("Optimizer.step#Adam.step").stats();
}

void SmallTraining::zero_grad(EventBuilder& trace) const { trace.no_op().free("grad_weight"); }

Trace training_that_fits() {
  EventBuilder trace({.gpu_bytes = 1_GiB});
  const SmallTraining training;
  training.setup(trace);
  for (uint64_t step = 0; step < 2; ++step) {
    training.forward(trace, step * 3);
    training.backward(trace, step * 3);
    training.optimizer(trace, step == 0);
    training.zero_grad(trace);
  }
  return trace.stats();
}

Trace oom_in_backward() {
  EventBuilder trace({.gpu_bytes = 256_MiB});
  const SmallTraining training;
  training.setup(trace);
  training.forward(trace, 0);
  trace.thread(2).node("MeanBackward0", 2).walk();
  describe_graph(trace, 0, training.shape);
  trace.op({.op = "aten::expand_div", .grad = false}).alloc("grad_relu1", training.activation_bytes).end_node();
  trace.node("ReluBackward0", 1).op({.op = "aten::threshold_backward", .grad = false});
  trace.oom(training.activation_bytes).requested_gradient(training.activation_bytes, training.shape, 0).walk();
  describe_graph(trace, 0, training.shape);
  trace.op_failed().no_op().free("grad_relu1").end_node();
  trace.thread(1).no_op().free("relu1").free("input").free("loss").free("weight");
  return trace;
}

Trace oom_in_forward() {
  EventBuilder trace({.gpu_bytes = 160_MiB});
  const SmallTraining training;
  training.setup(trace);
  trace.op({.op = "aten::randn", .source = "train.py:9"}).alloc("input", training.activation_bytes);
  trace.op({.op = "aten::conv2d", .inner = "aten::cudnn_convolution", .module = "conv1", .source = "train.py:10"});
  trace.alloc("conv1", training.activation_bytes).nodes(0);
  trace.op({.op = "aten::relu", .module = "relu1", .source = "train.py:11"}).nodes(1);
  trace.oom(training.activation_bytes).walk();
  trace.saved("input", "ConvolutionBackward0", 0, training.shape);
  trace.saved("weight", "ConvolutionBackward0", 0, kWeightShape);
  trace.names(EventKind::parameter, "weight", "conv1.weight", kWeightShape);
  trace.op_failed().no_op().free("conv1").free("input").free("weight");
  return trace;
}

Trace oom_in_optimizer() {
  EventBuilder trace({.gpu_bytes = 230_MiB});
  const SmallTraining training{.activation_bytes = 48_MiB, .shape = "[48, 32, 64, 128] float32"};
  training.setup(trace);
  training.forward(trace, 0);
  training.backward(trace, 0);
  trace.op({.op = "aten::zeros", .grad = false}).alloc("kept", 190_MiB);
  trace.begin_scope("Optimizer.step#Adam.step");
  trace.op({.op = "aten::zeros_like", .grad = false}).alloc("exp_avg", 4_MiB);
  trace.op({.op = "aten::zeros_like", .grad = false}).oom(64_MiB).op_failed();
  trace.end_scope("Optimizer.step#Adam.step");
  return trace;
}

}  // namespace oomdiag
