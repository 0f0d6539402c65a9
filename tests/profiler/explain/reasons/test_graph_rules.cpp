#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of graph_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("a graph before the first trained module trains nothing", "[explain][reasons]") {
  DeviceHistory device = at_oom({parameter("backbone.0.weight", false), parameter("head.weight", true)});
  device.state.allocated_bytes += 200_MiB;
  device.step_allocations = {.step = 5,
                             .blocks = {graph_block("backbone.0", 150_MiB), graph_block("backbone.1", 50_MiB)}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "graph_without_use");
  CHECK(reason->text ==
        "backbone builds a graph that trains nothing: none of its parameters is an optimizer's, 200.00 MiB (net.py:5)");
  device.referrers = {{.variable = "dict 'teacher._modules[\"backbone\"]._modules[0]._parameters' in train.py",
                       .storage_bytes = device.state.blocks[0].requested_bytes}};
  const auto named = find_reason({.device = device, .growths = {}});
  REQUIRE(named);
  CHECK(named->text.starts_with("teacher builds a graph that trains nothing"));
  CHECK(named->how.front() == "with torch.no_grad():  # around the call of teacher; or output.detach()");
  CHECK(find_fix(reason->fix) != nullptr);
}

TEST_CASE("behind a trained module gradients may flow through one that is not", "[explain][reasons]") {
  DeviceHistory device = at_oom({parameter("generator.weight", true), parameter("vgg.0.weight", false)});
  device.state.allocated_bytes += 200_MiB;
  device.step_allocations = {.step = 5, .blocks = {graph_block("generator", 10_MiB), graph_block("vgg.0", 190_MiB)}};
  CHECK(reason_of(device).empty());
  device.state.blocks.front().name = "image";  // that is optimized: any op may lead to it
  CHECK(reason_of(device).empty());
  device.state.blocks.front().trained = false;  // no optimizer is known
  CHECK(reason_of(device).empty());
}

TEST_CASE("of twins of which one is trained each has made half of the graph", "[explain][reasons]") {
  const std::vector<Where> saves{{.node = "MmBackward0"}};
  DeviceHistory device = at_oom({parameter("0.weight", true), parameter("0.weight", false)});
  device.state.allocated_bytes += 200_MiB;
  device.step_allocations = {.step = 5, .blocks = {graph_block("0", 100_MiB), graph_block("0", 100_MiB)}};
  CHECK(reason_of(device).empty());  // the other one may be an average of the weights, which is not called
  device.state.blocks.back().saved_by = saves;
  CHECK(reason_of(device) == "graph_without_use");
}

TEST_CASE("a request inside of vmap is for all samples", "[explain][reasons]") {
  DeviceHistory device = at_oom({}, "/v/torch/_functorch/vmap.py:507 in _flat_vmap\n/a/train.py:68 in main");
  CHECK(reason_of(device) == "vectorized_over_all");
}

TEST_CASE("a step of several passes is no evaluation where the step before had as many", "[explain][reasons]") {
  DeviceHistory device = at_oom(std::vector<LiveBlock>(6, kept_activation(100_MiB, 5)));
  device.state.blocks.push_back(parameter("0.weight", true));
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.complete = {.step = 4, .blocks = std::vector<StepAllocation>(6, graph_block("0.act", 100_MiB))};
  CHECK(reason_of(device) == "several_forward_passes");
}

TEST_CASE("passes that another function calls than the first ones are no training", "[explain][reasons]") {
  DeviceHistory device = at_oom(std::vector<LiveBlock>(6, kept_activation(100_MiB, 5)),
                                "/a/net.py:9 in forward\n/a/train.py:40 in draw\n/a/train.py:90 in main");
  device.state.blocks.push_back(parameter("0.weight", true));
  StepAllocation begin = graph_block("0.act", 1_MiB);
  begin.made.op = "aten::gelu";
  device.complete = {.step = 4, .blocks = {begin, begin, begin, begin}};
  CHECK(reason_of(device) == "several_forward_passes");  // as in the step before
  device.failure->first_stack = device.failure->stack;
  CHECK(reason_of(device) == "several_forward_passes");
  device.failure->first_stack = "/a/net.py:9 in forward\n/a/train.py:20 in train_step\n/a/train.py:80 in main";
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("a model in evaluation mode whose first pass keeps its graph evaluates with gradients",
          "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(300_MiB, 5)}, "/a/net.py:9 in forward\n/a/probe.py:40 in draw");
  CHECK(reason_of(device) != "evaluation_keeps_graphs");
  device.failure->modules_evaluate = true;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.state.blocks.push_back(
      parameter("0.weight", true));  // gradients of an image, through a model that is evaluated
  CHECK(reason_of(device) != "evaluation_keeps_graphs");
}

TEST_CASE("adapters inside of a frozen layer are trained", "[explain][reasons]") {
  DeviceHistory device = at_oom({parameter("layers.0.q.weight", false), parameter("layers.0.q.A", true)});
  device.state.blocks.front().saved_by = std::vector<Where>{{.module = "layers.0.q", .source = "net.py:5"}};
  device.state.allocated_bytes += 200_MiB;
  device.step_allocations = {.step = 5, .blocks = {graph_block("layers.0.q", 200_MiB)}};
  CHECK(reason_of(device).empty());
}

TEST_CASE("an untrained model's pass that begins with data trains nothing, also behind a trained one",
          "[explain][reasons]") {
  DeviceHistory device = at_oom({parameter("generator.weight", true), parameter("vgg.0.weight", false)});
  device.state.allocated_bytes += 400_MiB;
  StepAllocation of_data = graph_block("vgg.0", 190_MiB), of_generator = of_data, data;
  of_generator.made.source = "net.py:6";
  data = {.bytes = 1_MiB, .born = 1, .saved_by = std::vector<Where>{{.module = "vgg.0", .source = "net.py:5"}}};
  device.step_allocations = {.step = 5, .blocks = {graph_block("generator", 10_MiB), of_data, of_generator}};
  CHECK(reason_of(device).empty());
  device.step_allocations.blocks.insert(device.step_allocations.blocks.begin(), data);
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "graph_without_use");
  CHECK(reason->bytes == 190_MiB);
}

TEST_CASE("what is left of backward once all that is trained has its gradient has no use", "[explain][reasons]") {
  const std::vector<Where> saves{{.node = "MmBackward0"}};
  LiveBlock untrained = parameter("1.weight", false);
  untrained.saved_by = saves;
  LiveBlock activation = kept_activation(200_MiB, 5);
  activation.saved_by = saves;
  const LiveBlock gradient{.bytes = 1_MiB, .category = Category::gradient, .step = 5};
  DeviceHistory device = at_oom({parameter("0.weight", true), untrained, untrained, activation});
  device.failure->phase = Phase::backward;
  CHECK(reason_of(device).empty());  // its gradient is to come
  device.state.blocks.push_back(gradient);
  CHECK(reason_of(device) == "graph_without_use");
  device.state.blocks.front().saved_by = saves;
  CHECK(reason_of(device).empty());
}

TEST_CASE("a model in evaluation mode that keeps more than a training step had is validated", "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(300_MiB, 5), parameter("0.weight", true)},
                                "/a/net.py:9 in forward\nsite-packages/torch/nn/modules/module.py:1 in _call_impl\n"
                                "/a/train.py:70 in main");
  device.failure->modules_evaluate = true;
  device.complete = {.step = 4, .blocks = {graph_block("0.act", 280_MiB)}};
  CHECK(reason_of(device) != "evaluation_keeps_graphs");  // trained in evaluation mode
  device.complete = {.step = 4, .blocks = {graph_block("0.act", 150_MiB)}};
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("a graph that a variable has beside a backward pass is named by it", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(5, LiveBlock{.bytes = 100_MiB,
                                             .category = Category::output,
                                             .phase = Phase::forward,
                                             .step = 5,
                                             .made = {.op = "aten::relu", .module = "main.3", .source = "gan.py:34"}});
  DeviceHistory device = at_oom(blocks);
  device.failure->phase = Phase::backward;
  device.failure->where = {
      .node = "ConvolutionBackward0", .op = "aten::conv2d", .module = "main.2", .source = "gan.py:50"};
  device.referrers = {{.variable = "variable 'fake' in train_critic (gan.py:58)",
                       .made = {.op = "aten::tanh", .module = "main.9", .source = "gan.py:34"},
                       .nodes = 12,
                       .bytes = 8_MiB}};
  CHECK_FALSE(find_graph_beside_backward({.device = device, .growths = {}}));  // no step before tells
  device.complete = {.step = 4, .blocks = {graph_block("main.3", 1_MiB)}};
  const auto reason = find_graph_beside_backward({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(
      reason->text ==
      "the graph behind 'fake' is no part of this backward pass, nor of that of the step before, and holds 500.00 MiB "
      "(gan.py:34)");
  CHECK(reason->kept_by == "variable 'fake' in train_critic (gan.py:58)");
  StepAllocation ran = graph_block("main.3", 1_MiB);  // in the step before
  ran.phase = Phase::backward;
  ran.made.source = "gan.py:34";
  device.complete.blocks.push_back(ran);
  CHECK_FALSE(find_graph_beside_backward({.device = device, .growths = {}}));
}

TEST_CASE("a graph that backward has gone through is retained, unless backward made a graph of its own",
          "[explain][reasons]") {
  LiveBlock retained = kept_activation(200_MiB, 4);
  retained.backward_ran = true;
  DeviceHistory device = at_oom({retained});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "retained_graph");
  CHECK(
      reason->text ==
      "backward(retain_graph=True): backward has gone through this graph, and it still keeps 200.00 MiB of activations "
      "at net.py:9");
  LiveBlock derivative = kept_activation(200_MiB, 4);
  derivative.phase = Phase::backward;
  derivative.saved_by = std::vector<Where>{{.node = "MulBackward0"}};
  device = at_oom({retained, derivative});
  CHECK(reason_of(device) == "second_derivatives");
  CHECK(find_reason({.device = device, .growths = {}})->bytes == 400_MiB);
  derivative.saved_by = {};  // what backward made, and no node keeps
  CHECK(reason_of(at_oom({retained, derivative})) == "retained_graph");
  device = at_oom({retained});
  device.failure->phase = Phase::backward;  // which may go through the same graph
  CHECK(reason_of(device) != "retained_graph");
}

TEST_CASE("what backward() of a function of the program keeps is no second derivative", "[explain][reasons]") {
  std::vector<LiveBlock> blocks;
  for (const std::string_view module : {"0.fn", "1.fn", "2.fn"}) {
    blocks.push_back({.bytes = 30_MiB,
                      .category = Category::activation,
                      .phase = Phase::backward,
                      .step = 5,
                      .made = {.node = "MyFunctionBackward", .op = "aten::empty", .module = module, .source = "f.py:9"},
                      .saved_by = {{.op = "aten::relu"}}});
  }
  DeviceHistory device = at_oom(blocks);
  device.failure->phase = Phase::backward;
  device.failure->where = {.node = "MyFunctionBackward", .op = "aten::conv3d"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "kept_by_function");
  CHECK(reason->text ==
        "what MyFunctionBackward makes in backward stays for 3 of the layers that it has been through at f.py:9: 90.00 "
        "MiB");
  device.state.blocks.pop_back();
  CHECK(reason_of(device) != "kept_by_function");
  device.failure->where.node = "ReluBackward0";
  for (LiveBlock& block : device.state.blocks) block.made.node = "ReluBackward0";
  CHECK(reason_of(device) == "second_derivatives");
}

TEST_CASE("a leaf that a package joined wants a gradient: of an attribution a backward pass is to come",
          "[explain][reasons]") {
  const LiveBlock input{.bytes = 4_MiB,
                        .category = Category::parameter,
                        .made = {.op = "aten::cat", .source = "explain.py:8"},
                        .saved_by = std::vector<Where>{{.node = "ConvolutionBackward0"}}};
  DeviceHistory device = at_oom({kept_activation(300_MiB, 5)}, "/a/net.py:9 in forward\n/a/explain.py:8 in draw");
  device.failure->modules_evaluate = true;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.state.blocks.push_back(input);
  CHECK(reason_of(device) != "evaluation_keeps_graphs");
}

}  // namespace oomdiag
