#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of pass_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("evaluation that keeps graphs is recognized by the function that failed", "[explain][reasons]") {
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 5), kept_activation(100_MiB, 5)}, kValidates);
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "evaluation_keeps_graphs");
  CHECK(reason->text ==
        "evaluation keeps autograd graphs: 2 forward passes that no backward follows hold 200.00 MiB (validate(), "
        "train.py:68)");
  CHECK(reason->bytes == 200_MiB);
}

TEST_CASE("without graphs of this step evaluation is no reason", "[explain][reasons]") {
  CHECK(reason_of(at_oom({kept_activation(100_MiB, 4)}, kValidates)).empty());
  CHECK(reason_of(at_oom({}, kValidates)).empty());
  CHECK(reason_of(at_oom({kept_activation(100_MiB, 5)}, "/a/train.py:68 in train\n")).empty());
}

TEST_CASE("passes in a row are an evaluation, unless the program has yet to train", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(4, kept_activation(100_MiB, 5));
  CHECK(reason_of(at_oom(blocks)) == "evaluation_keeps_graphs");
  blocks.push_back({.bytes = 1_MiB, .category = Category::parameter, .trained = true});
  CHECK(reason_of(at_oom(blocks)) == "evaluation_keeps_graphs");  // it has trained before
  DeviceHistory first = at_oom(blocks);
  first.attribution.backward_bytes = 0;
  CHECK(reason_of(first) == "several_forward_passes");
}

TEST_CASE("what a package calls an evaluation may be a part of its training", "[explain][reasons]") {
  constexpr std::string_view kRolloutIsLearned =
      "/v/site-packages/agents/policies.py:9 in evaluate_actions\n/v/site-packages/agents/ppo.py:68 in "
      "train\n/a/train.py:90 in main";
  const std::vector<LiveBlock> kept(2, kept_activation(100_MiB, 5));
  CHECK(reason_of(at_oom(kept, kValidates)) == "evaluation_keeps_graphs");
  CHECK(reason_of(at_oom(kept, kRolloutIsLearned)).empty());
}

TEST_CASE("passes of which no node is known are counted by the blocks of the graph", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 300_MiB, .category = Category::output, .step = 5}});
  const StepAllocation pass{.bytes = 100_MiB,
                            .born = 1,
                            .phase = Phase::forward,
                            .in_graph = true,
                            .made = {.op = "aten::gelu", .module = "0.act", .source = "net.py:9"}};
  device.step_allocations = {.step = 5, .blocks = {pass, pass, pass}};
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("a layer that one pass uses several times makes one forward pass", "[explain][reasons]") {
  const StepAllocation embedding{.bytes = 1_MiB,
                                 .born = 1,
                                 .phase = Phase::forward,
                                 .in_graph = true,
                                 .made = {.op = "aten::embedding", .module = "words", .source = "net.py:5"}};
  StepAllocation shared = embedding;
  shared.made = {.op = "aten::gelu", .module = "0.act", .source = "net.py:9"};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(6, kept_activation(100_MiB, 5)));
  device.step_allocations = {.step = 5, .blocks = {embedding, shared, shared, shared, shared, shared, shared}};
  CHECK(reason_of(device).empty());
  device.step_allocations.blocks.insert(device.step_allocations.blocks.end(), {embedding, embedding, embedding});
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("passes of a training step that has as many each time are no evaluation", "[explain][reasons]") {
  DeviceHistory device = at_oom(std::vector<LiveBlock>(3, kept_activation(100_MiB, 5)));
  device.state.blocks.push_back(parameter("0.weight", true));
  StepAllocation begin = graph_block("0.act", 1_MiB);
  begin.made.op = "aten::gelu";
  device.complete = {.step = 4, .blocks = {begin}};
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.complete.blocks.assign(3, begin);
  CHECK(reason_of(device) != "evaluation_keeps_graphs");
}

TEST_CASE("a first pass of a function that runs backward later is no evaluation", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(4, kept_activation(100_MiB, 1));
  for (LiveBlock& block : blocks) block.shape = "[1024, 64] float32";
  DeviceHistory device = at_oom(blocks);
  device.attribution.backward_bytes = 0;
  device.failure->step = 1;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.failure->names_backward = true;
  CHECK(reason_of(device) == "several_forward_passes");
  device.failure->step = 9;  // so many went by without
  for (LiveBlock& block : device.state.blocks) block.step = 9;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.failure->step = 1;
  for (LiveBlock& block : device.state.blocks) block.step = 1;
  device.failure->modules_evaluate = true;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("a sum of losses keeps the graphs of all turns of its loop", "[explain][reasons]") {
  const auto made = [](std::string_view op, std::string_view source) {
    return LiveBlock{.bytes = 64_MiB,
                     .requested_bytes = 64_MiB,
                     .category = Category::input,
                     .phase = Phase::forward,
                     .step = 5,
                     .made = {.op = op, .source = source}};
  };
  std::vector<LiveBlock> blocks(6, made("aten::matmul", "sum.py:6"));
  blocks.resize(13, made("aten::randn", "sum.py:5"));  // one turn more has begun
  DeviceHistory device = at_oom(blocks);
  device.attribution.backward_bytes = 1;
  CHECK_FALSE(find_graphs_of_loop({.device = device, .growths = {}}));
  device.referrers = {{.variable = "variable 'loss' in sum.py", .nodes = 24, .bytes = 4, .storage_bytes = 4}};
  const auto reason = find_graphs_of_loop({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "7 turns of a loop keep their graphs until one backward for all of them: 832.00 MiB (sum.py:6); 'loss' adds up "
        "what they make");
}

TEST_CASE("a cell that runs for each position is a sequence that is too long", "[explain][reasons]") {
  LiveBlock gates = kept_activation(10_MiB, 5);
  gates.made = {.op = "aten::gru_cell", .module = "GRUCell", .source = "net.py:9"};
  std::vector<LiveBlock> blocks(40, gates);
  CHECK(reason_of(at_oom(blocks)) == "evaluation_keeps_graphs");
  blocks.push_back(parameter("weight_hh", true));
  CHECK(reason_of(at_oom(blocks)) == "unrolled_sequence");
  CHECK(reason_of(at_oom(blocks, kValidates)) == "evaluation_keeps_graphs");
}

TEST_CASE("layers that are called one by one are one forward pass", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(8, kept_activation(100_MiB, 5));
  const LiveBlock weight = parameter("scale", false);
  blocks.insert(blocks.end(), 8, weight);
  CHECK(reason_of(at_oom(blocks)).empty());
}

TEST_CASE("turns of a loop within one pass are an unrolled sequence, whatever its layers", "[explain][reasons]") {
  StepAllocation begin = graph_block("words", 1_MiB);
  begin.made.op = "aten::embedding";
  DeviceHistory device = at_oom(std::vector<LiveBlock>(20, kept_activation(100_MiB, 5)));
  device.state.blocks.push_back(parameter("0.act.weight", true));
  device.step_allocations = {.step = 5, .blocks = {begin}};
  CHECK(reason_of(device) == "unrolled_sequence");
  LiveBlock whole = kept_activation(8_GiB, 5);  // made once, for all turns
  whole.made.op = "aten::exp";
  device.state.blocks.push_back(whole);
  device.state.allocated_bytes += whole.bytes;
  CHECK(reason_of(device) != "unrolled_sequence");
  device.state.blocks.pop_back();
  device.state.allocated_bytes -= whole.bytes;
  device.step_allocations.blocks.assign(20, begin);  // the whole model ran as often
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("where gradients are wanted of an input, a model in evaluation mode is differentiated",
          "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(300_MiB, 5)}, "/a/net.py:9 in forward\n/a/probe.py:40 in draw");
  device.failure->modules_evaluate = true;
  device.referrers = {
      {.variable = "variable 'image' in draw (probe.py:30)", .storage_bytes = 1_MiB, .wants_gradient = true}};
  CHECK(reason_of(device) != "evaluation_keeps_graphs");
}

TEST_CASE("a loop after training whose data want gradients says so, and which part needs none", "[explain][reasons]") {
  DeviceHistory device = at_oom(std::vector<LiveBlock>(3, kept_activation(100_MiB, 5)),
                                "/a/net.py:9 in forward\n/a/sample.py:40 in sample");
  device.referrers = {{.variable = "variable 'latents' in sample (sample.py:30)", .wants_gradient = true}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("a loop keeps autograd graphs, as 'latents' requires gradients: 3 forward passes"));
  CHECK(reason->how.front().find("needs gradients of 'latents'") != std::string::npos);
}

TEST_CASE("where no backward has ever run, the graphs of all steps count, and are named by who calls the model",
          "[explain][reasons]") {
  DeviceHistory device = at_oom({},
                                "/a/net.py:9 in forward\nsite-packages/torch/nn/modules/module.py:1 in _call_impl\n"
                                "/a/texts.py:40 in compute_states\n/a/texts.py:90 in <module>");
  device.attribution.backward_bytes = 0;
  device.failure->modules_evaluate = true;
  for (uint32_t step = 1; step < 5; ++step) {
    for (const char* op : {"aten::gelu", "aten::linear", "aten::add"}) {
      LiveBlock block = kept_activation(20_MiB, step);
      block.made.op = op;
      device.state.blocks.push_back(block);
      device.state.allocated_bytes += block.bytes;
    }
  }
  CHECK(reason_of(device) != "evaluation_keeps_graphs");  // no op of this step was recorded by autograd
  device.step_allocations = {.step = 5, .blocks = {graph_block("0.act", 20_MiB)}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "a model in evaluation mode keeps autograd graphs: 5 forward passes that no backward has followed hold 260.00 "
        "MiB "
        "(compute_states(), texts.py:40)");
  for (LiveBlock& block : device.state.blocks) block.made.op = "aten::gelu";  // a result that may be detached
  CHECK(reason_of(device) != "evaluation_keeps_graphs");
}

TEST_CASE("of a program without an optimizer the next pass is for no backward, too", "[explain][reasons]") {
  DeviceHistory device = at_oom({},
                                "/a/net.py:9 in forward\nsite-packages/torch/nn/modules/module.py:1 in _call_impl\n"
                                "/a/serve.py:40 in embed\n/a/serve.py:90 in <module>");
  device.attribution.backward_bytes = 0;
  device.failure->step = 3;
  for (const char* op : {"aten::softmax", "aten::linear", "aten::add"}) {
    LiveBlock block = kept_activation(100_MiB, 3);
    block.made.op = op;
    device.state.blocks.push_back(block);
    device.state.allocated_bytes += block.bytes;
  }
  CHECK(reason_of(device) != "evaluation_keeps_graphs");  // the pass before built no graph
  device.complete = {.step = 2, .blocks = {graph_block("0.act", 10_MiB)}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "evaluation keeps autograd graphs: no backward has followed any of 2 forward passes, and this one keeps 300.00 "
        "MiB for one (embed(), serve.py:40)");
  device.failure->step = 2;
  CHECK(reason_of(device) != "evaluation_keeps_graphs");  // the first passes may be to try it
}

TEST_CASE("passes each of which goes on from the one before are a rollout", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(8, kept_activation(40_MiB, 5));
  blocks.push_back(parameter("0.weight", true));
  DeviceHistory device = at_oom(blocks);
  device.attribution.backward_bytes = 0;
  const auto fix_of = [&] { return find_reason({.device = device, .growths = {}})->fix; };
  CHECK(fix_of() == "backward_of_each_pass");
  device.referrers = {{.variable = "variable 'position' in roll (sim.py:3)", .nodes = 200, .bytes = 8000}};
  CHECK(fix_of() == "checkpoint_each_pass");
  device.referrers.front().bytes = 4;  // a sum of losses
  CHECK(fix_of() == "backward_of_each_pass");
}

TEST_CASE("who has the graph in a variable calls what is to run without one", "[explain][reasons]") {
  DeviceHistory device =
      at_oom({kept_activation(100_MiB, 5), kept_activation(100_MiB, 5)},
             "/a/net.py:9 in forward\n/a/vae.py:74 in decode_latents\n/a/vae.py:99 in test_reconstruct\n"
             "/a/vae.py:120 in main");
  device.attribution.backward_bytes = 0;
  device.failure->modules_evaluate = true;
  device.failure->first_stack = "/a/net.py:9 in forward\n/a/vae.py:70 in encode\n/a/vae.py:98 in test_reconstruct";
  device.referrers = {{.variable = "variable 'latents' in main (vae.py:110)", .nodes = 20, .bytes = 4_MiB}};
  const auto reason = find_graphs_in_evaluation({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->how.front().find("main") != std::string::npos);
  device.failure->names_backward = true;  // main() trains, too
  const auto elsewhere = find_graphs_in_evaluation({.device = device, .growths = {}});
  REQUIRE(elsewhere);
  CHECK(elsewhere->how.front().find("main") == std::string::npos);
}

TEST_CASE("parts of a loss that a loop makes keep their graphs until one backward", "[explain][reasons]") {
  const auto parts = [](int turns) {
    DeviceHistory device = at_oom({parameter("0.weight", true)});
    for (int i = 0; i < turns; ++i) {
      for (const char* op : {"aten::mul", "aten::exp", "aten::sub"}) {
        LiveBlock part = kept_activation(20_MiB, 5);
        part.made = {.op = op, .source = "loss.py:7"};
        device.state.blocks.push_back(part);
        device.state.allocated_bytes += part.bytes;
      }
    }
    return device;
  };
  const DeviceHistory device = parts(6);
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "6 turns of a loop keep their graphs until one backward for all of them: 360.00 MiB (loss.py:7)");
  CHECK(reason->fix == "backward_of_each_pass");
  CHECK(reason_of(parts(2)) != "several_forward_passes");
}

TEST_CASE("a loop that turns far more often than training is no training", "[explain][reasons]") {
  const Where attention{.op = "aten::gelu", .module = "0.act", .source = "net.py:9"};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(40, kept_activation(10_MiB, 5)));
  device.state.blocks.push_back(parameter("0.weight", true));
  StepAllocation one = graph_block("0.act", 1_MiB);
  one.made = attention;
  device.step_allocations = {.step = 5, .blocks = {graph_block("embed", 1_MiB), one}};
  CHECK(reason_of(device) == "unrolled_sequence");
  device.complete = {.step = 4, .blocks = {graph_block("embed", 1_MiB), one}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("a loop keeps autograd graphs: 40 forward passes that no backward has followed"));
}

TEST_CASE("losses that a training loop adds up are no evaluation, though predict() makes them", "[explain][reasons]") {
  constexpr std::string_view kPredicts = "/a/net.py:9 in forward\n/a/train.py:68 in predict\n/a/train.py:90 in train";
  std::vector<LiveBlock> blocks(5, kept_activation(100_MiB, 5));
  blocks.push_back(parameter("0.weight", true));
  DeviceHistory device = at_oom(blocks, kPredicts);
  device.attribution.backward_bytes = 0;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.referrers = {{.variable = "variable 'batch_loss' in train (train.py:80)", .nodes = 60, .bytes = 4}};
  CHECK(reason_of(device) == "several_forward_passes");
  device.referrers.front().variable = "variable 'total' in predict (train.py:60)";  // of the evaluation itself
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.referrers.front().variable = "list 'losses' in train (train.py:80)";
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("the losses of passes before one backward are named, and the graph of one pass is needed",
          "[explain][reasons]") {
  std::vector<LiveBlock> blocks(4, kept_activation(100_MiB, 5));
  blocks.push_back(parameter("0.weight", true));
  DeviceHistory device = at_oom(blocks, "/a/net.py:9 in forward\n/a/train.py:68 in train_step\n/a/train.py:90 in main");
  device.attribution.backward_bytes = 0;
  device.referrers = {{.variable = "variable 'loss_a' in train_step (train.py:60)", .nodes = 60, .bytes = 4}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "several_forward_passes");
  CHECK(reason->bytes == 300_MiB);
  REQUIRE(reason->how.size() == 1);
  CHECK(reason->how.front().starts_with("loss_a.backward()  # before the next forward pass"));
}

TEST_CASE("layers that are alike are no turns of a loop of the module around them", "[explain][reasons]") {
  DeviceHistory device = at_oom({parameter("student.0.weight", true)});
  StepAllocation begin = graph_block("words", 1_MiB);
  begin.made.op = "aten::embedding";
  std::vector<std::string> names;
  for (int i = 0; i < 20; ++i) names.push_back("encoder.layers." + std::to_string(i) + ".norm");
  for (const std::string& name : names) {
    LiveBlock sum = kept_activation(10_MiB, 5), norm = sum;
    sum.made = {.op = "aten::add", .module = "encoder", .source = "net.py:9"};
    norm.made = {.op = "aten::layer_norm", .module = name, .source = "net.py:9"};
    device.state.blocks.insert(device.state.blocks.end(), {sum, norm});
    device.state.allocated_bytes += 20_MiB;
  }
  device.step_allocations = {.step = 5, .blocks = {begin}};
  CHECK(reason_of(device) != "unrolled_sequence");
  for (LiveBlock& block : device.state.blocks) {
    if (block.made.module.ends_with(".norm")) block.made.module = "encoder.cell.norm";  // one, 20 times
  }
  CHECK(reason_of(device) == "unrolled_sequence");
}

TEST_CASE("no_grad() of another thread is said not to hold where a thread runs the model", "[explain][reasons]") {
  DeviceHistory device =
      at_oom({kept_activation(100_MiB, 5), kept_activation(100_MiB, 5)},
             "/a/net.py:9 in forward\n/a/tts.py:81 in latents\n/usr/lib/python3.11/threading.py:982 in run\n");
  device.attribution.backward_bytes = 0;
  device.failure->modules_evaluate = true;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "evaluation_keeps_graphs");
  CHECK(reason->text.ends_with(", in a thread for which no_grad() of another does not hold"));
  CHECK(reason->how.front().starts_with("@torch.no_grad()  # above def latents, which tts.py:81 is in: "));
}

}  // namespace oomdiag
