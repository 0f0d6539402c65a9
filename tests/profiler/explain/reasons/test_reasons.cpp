#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

// The rows of kReasons, each with values: what makes it hold, and what looks alike and is another reason or none. A new row has a case
// here; programs that it is for are in tests/causes.

namespace oomdiag {
namespace {

LiveBlock kept_activation(int64_t bytes, uint32_t step) {
  return {.bytes = bytes,
          .category = Category::activation,
          .phase = Phase::forward,
          .step = step,
          .made = {.op = "aten::gelu", .module = "0.act", .source = "net.py:9"},
          .shape = "[64, 64] float32"};
}

/// Ran out of memory in forward of step 5, for as much as is allocated.
DeviceHistory at_oom(std::vector<LiveBlock> blocks, std::string_view stack = {}) {
  DeviceHistory device;
  for (const LiveBlock& block : blocks) device.state.allocated_bytes += block.bytes;
  device.state.blocks = std::move(blocks);
  device.failure = OutOfMemory{.step = 5, .phase = Phase::forward, .requested_bytes = 64_MiB, .stack = stack};
  device.attribution.backward_bytes = 1_GiB;
  return device;
}

/// What can be said of any step is none.
std::string reason_of(const DeviceHistory& device, const std::vector<Growth>& growths = {}) {
  const auto reason = find_reason({.device = device, .growths = growths});
  if (!reason || reason->id == "whole_step") return {};
  CHECK((reason->fix.empty() || find_fix(reason->fix) != nullptr));
  return reason->id;
}

constexpr std::string_view kValidates = "/a/net.py:9 in forward\n/a/train.py:68 in validate\n/a/train.py:90 in main";

}  // namespace

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

namespace {

StepAllocation graph_block(std::string_view module, int64_t bytes) {
  return {.bytes = bytes,
          .born = 1,
          .phase = Phase::forward,
          .in_graph = true,
          .made = {.op = "aten::relu", .module = module, .source = "net.py:5"}};
}

LiveBlock parameter(std::string_view name, bool trained) {
  return {
      .bytes = 1_MiB, .category = Category::parameter, .name = name, .shape = "[512, 512] float32", .trained = trained};
}

}  // namespace

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

TEST_CASE("who keeps the graph of each step is said by name, and so is what hands it on", "[explain][reasons]") {
  const std::string variable = "variable 'energies' in run_dynamics (simulate_all_systems.py:463)";
  const Growth growth{
      .kind = GrowthKind::retained_graph, .bytes_per_step = 10_MiB, .grown_bytes = 90_MiB, .referrer = variable};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const std::vector<Growth> growths{growth};
  auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->text == variable + " keeps the graph of each step, 10.00 MiB per step");
  CHECK(reason->how == std::vector<std::string>{"energies += loss.item()  # of a tensor: loss.detach()"});

  device.referrers = {
      {.variable = "attribute 'model.state' in run_dynamics (simulate_all_systems.py:463)", .nodes = 1}};
  reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->text ==
        variable + " keeps the graph of each step, 10.00 MiB per step; model.state hands it to the next");
  CHECK(reason->how == std::vector<std::string>{"model.state = model.state.detach()  # before the next step uses it"});
}

TEST_CASE("what functools.lru_cache keeps of each step is let go by its cache_clear()", "[explain][reasons]") {
  const Growth growth{
      .bytes_per_step = 10_MiB, .grown_bytes = 90_MiB, .referrer = "lru_cache of 'Net.positions' in train.py"};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const std::vector<Growth> growths{growth};
  const auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->how.front().starts_with("Net.positions.cache_clear()  # "));
}

TEST_CASE("graphs that grow without any backward are those of an evaluation, or wait for it", "[explain][reasons]") {
  const Growth growth{.kind = GrowthKind::retained_graph, .grown_bytes = 90_MiB};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {growth}) == "graph_of_earlier_steps");
  device.attribution.backward_bytes = 0;
  CHECK(reason_of(device, {growth}) == "evaluation_keeps_graphs");
  device.state.blocks.push_back(parameter("0.weight", true));
  CHECK(reason_of(device, {growth}) == "several_forward_passes");
}

TEST_CASE("outputs whose graph backward has freed are kept tensors", "[explain][reasons]") {
  const Growth growth{.kind = GrowthKind::retained_graph, .grown_bytes = 90_MiB};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  StepAllocation kept = graph_block("0", 80_MiB);
  kept.born = StepAllocation::kBefore;
  kept.category = Category::output;
  kept.ever_saved = true;
  device.step_allocations = {.step = 5, .blocks = {kept}};
  CHECK(reason_of(device, {growth}) == "kept_tensors");
  device.step_allocations.blocks.front().category = Category::activation;
  CHECK(reason_of(device, {growth}) == "graph_of_earlier_steps");
}

TEST_CASE("what no variable leads to is a reference cycle, if they were looked through", "[explain][reasons]") {
  const Growth growth{
      .kind = GrowthKind::kept_tensors, .grown_bytes = 90_MiB, .held = {.op = "aten::to", .source = "a.py:3"}};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {growth}) == "kept_tensors");
  device.looked_for_referrers = true;
  CHECK(reason_of(device, {growth}) == "reference_cycle");
  Growth named = growth;
  named.referrer = "list 'history' in a.py";
  CHECK(reason_of(device, {named}) == "kept_tensors");
  StepAllocation in_graph = graph_block("0", 80_MiB);
  in_graph.made = growth.held;
  device.step_allocations = {.step = 5, .blocks = {in_graph}};
  device.referrers = {{.variable = "variable 'total' in a.py", .nodes = 40}};
  CHECK(reason_of(device, {growth}) == "graph_of_earlier_steps");  // the graph of total keeps it
  device.referrers.front().nodes = 2;
  CHECK(reason_of(device, {growth}) == "reference_cycle");
}

TEST_CASE("of tensors of which a variable has parts only, views keep the rest", "[explain][reasons]") {
  const Where made{.op = "aten::mul", .source = "a.py:3"};
  const Growth growth{.kind = GrowthKind::kept_tensors,
                      .grown_bytes = 90_MiB,
                      .held = made,
                      .places = {{.where = made, .blocks = 9}},
                      .referrer = "list 'rows' in a.py"};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  device.looked_for_referrers = true;
  const Referrer whole{.variable = growth.referrer, .made = made, .bytes = 10_MiB, .storage_bytes = 10_MiB};
  device.referrers.assign(9, whole);
  CHECK(reason_of(device, {growth}) == "kept_tensors");
  Referrer part = whole;
  part.bytes = 1_MiB;
  device.referrers.assign(9, part);
  CHECK(reason_of(device, {growth}) == "small_view");
  device.referrers.insert(device.referrers.end(), 9, whole);
  CHECK(reason_of(device, {growth}) == "kept_tensors");
}

TEST_CASE("without steps equal tensors that no variable leads to are a reference cycle", "[explain][reasons]") {
  const LiveBlock state{
      .bytes = 40_MiB, .category = Category::input, .made = {.op = "aten::randn", .source = "a.py:3"}};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(9, state));
  device.looked_for_referrers = true;
  CHECK(reason_of(device) == "reference_cycle");
  device.referrers.assign(9, {.variable = "list 'states' in a.py", .made = state.made});
  CHECK(reason_of(device) == "kept_tensors");
}

TEST_CASE("models that a list comprehension moves to the GPU are no reference cycle", "[explain][reasons]") {
  const LiveBlock weight{.bytes = 40_MiB, .made = {.op = "aten::to", .source = "a.py:3"}};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(9, weight));
  device.looked_for_referrers = true;
  CHECK(reason_of(device) == "reference_cycle");
  for (LiveBlock& block : device.state.blocks) block.let_go = true;
  CHECK(reason_of(device).empty());
}

TEST_CASE("what the garbage collector freed after the failure was a reference cycle", "[explain][reasons]") {
  const LiveBlock weight{.bytes = 40_MiB, .let_go = true, .made = {.op = "aten::to", .source = "a.py:3"}};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(9, weight));
  device.looked_for_referrers = true;
  for (uint64_t b = 0; LiveBlock & block : device.state.blocks) {
    block.born = ++b;
    block.freed = 100 + b;
  }
  CHECK(reason_of(device) == "reference_cycle");
  for (LiveBlock& block : device.state.blocks) block.freed = 100 - block.born;  // a list frees its last item first
  CHECK(reason_of(device).empty());
}

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

TEST_CASE("equal buffers of several layers are no data set", "[explain][reasons]") {
  const LiveBlock mask{.bytes = 40_MiB,
                       .requested_bytes = 40_MiB,
                       .phase = Phase::setup,
                       .made = {.op = "aten::to", .source = "a.py:3"}};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(16, mask));
  CHECK(reason_of(device) == "data_on_gpu");
  device.referrers = {
      {.variable = "dict 'net._modules[0]._buffers' in main (a.py:9)", .made = mask.made, .storage_bytes = 40_MiB}};
  CHECK(reason_of(device) == "same_buffer_in_layers");
}

TEST_CASE("rows that are repeated before the layers are named by their line", "[explain][reasons]") {
  const LiveBlock rows{.bytes = 20_MiB, .requested_bytes = 20_MiB, .category = Category::input};
  LiveBlock copies{.bytes = 100_MiB,
                   .requested_bytes = 100_MiB,
                   .category = Category::input,
                   .made = {.op = "aten::repeat_interleave", .source = "a.py:3"}};
  LiveBlock keys = copies;
  keys.made = {.op = "aten::linear", .module = "k", .source = "a.py:5"};
  DeviceHistory device = at_oom({rows, copies, keys, keys});
  CHECK(reason_of(device).empty());  // it trains
  device.attribution.backward_bytes = 0;
  CHECK(reason_of(device) == "repeated_copies");
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "aten::repeat_interleave at a.py:3 copies rows, and what follows is as large: 3 tensors of 100.00 MiB");
  CHECK(reason_of(at_oom({copies, keys, keys})).empty());
}

TEST_CASE("results of elementwise ops beside one another could be one", "[explain][reasons]") {
  LiveBlock wide{.bytes = 64_MiB,
                 .requested_bytes = 64_MiB,
                 .category = Category::output,
                 .step = 5,
                 .made = {.op = "aten::to", .source = "a.py:3"}};
  LiveBlock divided = wide;
  divided.made = {.op = "aten::div", .source = "a.py:4"};
  DeviceHistory device = at_oom({wide, divided});
  device.failure->where = {.op = "aten::clamp", .source = "a.py:5"};
  CHECK(reason_of(device) == "elementwise_copies");
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "3 results of elementwise ops, 64.00 MiB each, are alive at once (a.py:3, 4, 5): 192.00 MiB");
}

TEST_CASE("an elementwise op beside its operand could work in place", "[explain][reasons]") {
  const LiveBlock sums{.bytes = 64_MiB,
                       .requested_bytes = 64_MiB,
                       .category = Category::input,
                       .step = 2,
                       .made = {.op = "aten::zeros", .source = "a.py:3"}};
  DeviceHistory device = at_oom({sums});
  device.failure->where = {.op = "aten::div", .source = "a.py:9"};
  device.referrers = {
      {.variable = "variable 'sums' in stitch (a.py:2)", .made = sums.made, .bytes = 64_MiB, .storage_bytes = 64_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "elementwise_copies");
  CHECK(reason->text ==
        "aten::div at a.py:9 makes a second tensor of 64.00 MiB beside variable 'sums' in stitch (a.py:2)");
  CHECK(reason->how.front().starts_with("sums.div_("));
  device.failure->where.op = "aten::rsub";  // has no method in place
  CHECK(reason_of(device) == "large_result");
  device.failure->where.op = "aten::div";
  device.referrers.clear();  // it may be gone as the op ends
  CHECK(reason_of(device) == "large_result");
}

TEST_CASE("attributes that keep tensors of a few earlier steps are named, variables are not", "[explain][reasons]") {
  LiveBlock seen{.bytes = 64_MiB,
                 .requested_bytes = 64_MiB,
                 .category = Category::output,
                 .phase = Phase::forward,
                 .step = 2,
                 .made = {.op = "aten::relu", .module = "1", .source = "a.py:3"}};
  LiveBlock later = seen;
  later.step = 3;
  later.made.module = "2";
  DeviceHistory device = at_oom({seen, later});
  device.state.step = 5;
  const auto refer = [&](const LiveBlock& block, std::string_view variable) {
    device.referrers.push_back(
        {.variable = variable, .made = block.made, .bytes = block.bytes, .storage_bytes = block.bytes});
  };
  refer(seen, "attribute 'nets[0].seen' in main (a.py:7)");
  refer(later, "attribute 'nets[1].seen' in main (a.py:7)");
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "attribute 'nets[*].seen' in main (a.py:7) keeps tensors of earlier steps at a.py:3: 128.00 MiB");
  device.referrers.clear();
  refer(seen, "variable 'output' in main (a.py:7)");
  refer(later, "variable 'output' in main (a.py:7)");
  CHECK(reason_of(device) != "kept_tensors");
}

TEST_CASE("rows that an index copies are named, and indices of as many elements", "[explain][reasons]") {
  const LiveBlock nodes{.bytes = 8_MiB, .requested_bytes = 8_MiB, .category = Category::input};
  LiveBlock edges{.bytes = 64_MiB,
                  .requested_bytes = 64_MiB,
                  .category = Category::output,
                  .made = {.op = "aten::index", .source = "a.py:3"},
                  .shape = "[8000, 2000] float32"};
  DeviceHistory device = at_oom({nodes, edges});
  device.failure->requested_bytes = 8_MiB;
  device.failure->where = {.op = "aten::zeros_like", .module = "conv", .source = "a.py:4"};
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "aten::index at a.py:3 copies rows: 64.00 MiB, as [8000, 2000] float32, of at most 8.00 MiB");
  edges.made.op = "aten::contiguous";
  edges.shape = "[8000, 1000] int64";
  device = at_oom({nodes, edges});
  device.failure->where = {.op = "aten::gather", .source = "a.py:4"};
  CHECK(reason_of(device) == "wide_index");
}

TEST_CASE("rows of a small table that are copied for each index are no embedding of words", "[explain][reasons]") {
  LiveBlock table = parameter("edges.weight", true);
  table.bytes = table.requested_bytes = 96_KiB;
  table.shape = "[6, 4096] float32";
  const LiveBlock rows{.bytes = 64_MiB,
                       .requested_bytes = 64_MiB,
                       .category = Category::activation,
                       .made = {.op = "aten::embedding", .module = "edges", .source = "a.py:3"}};
  DeviceHistory device = at_oom({table, rows});
  device.failure->where = rows.made;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "enlarged");
  CHECK(reason->text ==
        "aten::embedding at a.py:3 copies a row of edges.weight [6, 4096] float32 for each of its indices: 128.00 MiB "
        "of 96.00 KiB");
  device.state.blocks[0].bytes = 4_MiB;  // of words
  CHECK(reason_of(device) != "enlarged");
}

TEST_CASE("tensors of the program's own that have a row for each of many things are counted", "[explain][reasons]") {
  LiveBlock rays{.bytes = 64_MiB,
                 .requested_bytes = 64_MiB,
                 .category = Category::output,
                 .made = {.op = "aten::cat", .module = "Field", .source = "a.py:3"},
                 .shape = "[48, 230400, 4] float32"};
  LiveBlock centers = rays;
  centers.bytes = centers.requested_bytes = 48_MiB;
  centers.shape = "[48, 230400, 3] float32";
  DeviceHistory device = at_oom({rays, centers, centers});
  device.failure->where = {.op = "aten::cat", .module = "Field", .source = "a.py:4"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text == "3 tensors of 48 × 230400 rows are there at once, the largest at a.py:3: 160.00 MiB in all");
  for (LiveBlock& block : device.state.blocks) block.made.op = "aten::linear";  // a network's
  CHECK(reason_of(device) != "equal_rows");
}

TEST_CASE("one tensor is compared with what was there before", "[explain][reasons]") {
  const LiveBlock series{.bytes = 2_MiB,
                         .requested_bytes = 2_MiB,
                         .category = Category::input,
                         .made = {.op = "aten::to", .source = "a.py:3"},
                         .shape = "[1, 524288] float32"};
  DeviceHistory device = at_oom({series});
  device.failure->where = {.op = "aten::contiguous", .source = "a.py:9"};
  device.referrers = {
      {.variable = "variable 'series' in step (a.py:2)", .made = series.made, .bytes = 2_MiB, .storage_bytes = 2_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "one tensor of 64.00 MiB: aten::contiguous at a.py:9 makes it at once, 32 times as large as variable 'series' "
        "in step (a.py:2), [1, 524288] float32");
}

TEST_CASE("results that any container keeps are named by it, data that it held from the start are not",
          "[explain][reasons]") {
  const LiveBlock starts{.bytes = 8_MiB,
                         .requested_bytes = 8_MiB,
                         .category = Category::output,
                         .phase = Phase::forward,
                         .step = 5,
                         .made = {.op = "aten::contiguous", .source = "a.py:3"}};
  LiveBlock ends = starts;
  ends.made.source = "a.py:4";
  std::vector<LiveBlock> blocks(6, starts);
  blocks.resize(12, ends);
  DeviceHistory device = at_oom(blocks);
  const auto refer = [&](const LiveBlock& block, std::string_view variable) {
    device.referrers.push_back({.variable = variable, .made = block.made, .bytes = 8_MiB, .storage_bytes = 8_MiB});
  };
  refer(starts, "attribute 'kept[rays][0].starts' in render (a.py:7)");
  refer(ends, "attribute 'kept[rays][0].ends' in render (a.py:7)");
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "kept_tensors");
  CHECK(reason->text == "attribute 'kept[rays][*].starts' in render (a.py:7) keeps 12 results at a.py:3: 96.00 MiB");
  CHECK(reason->how.front().starts_with("for _each in kept[rays]: _each.starts = _each.starts.cpu()"));
  for (LiveBlock& block : device.state.blocks) block.phase = Phase::setup;
  CHECK(reason_of(device) != "kept_tensors");
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

TEST_CASE("layers that work on more than in the step before", "[explain][reasons]") {
  const auto results = [](int64_t bytes) {
    std::vector<StepAllocation> blocks;
    for (const std::string_view module : {"0", "1", "2"}) {
      blocks.push_back({.bytes = bytes,
                        .born = 1,
                        .category = Category::activation,
                        .phase = Phase::forward,
                        .made = {.op = "aten::linear", .module = module}});
    }
    return blocks;
  };
  const LiveBlock result{.bytes = 64_MiB,
                         .category = Category::activation,
                         .phase = Phase::forward,
                         .step = 5,
                         .made = {.op = "aten::linear", .module = "0", .source = "a.py:3"}};
  DeviceHistory device = at_oom({result, result});
  device.complete = {.step = 4, .blocks = results(8_MiB)};
  device.step_allocations = {.step = 5, .blocks = results(64_MiB)};
  device.failure->where.source = "a.py:3";
  device.step_allocations.blocks.push_back(graph_block("0", 1_MiB));
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "larger_step");
  CHECK(reason->how.front().starts_with("with torch.no_grad():"));  // no step before came to this line
  for (StepAllocation& block : device.complete.blocks) block.made.source = "a.py:3";
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->how.back().starts_with("with torch.no_grad():"));
  device.complete.blocks = results(64_MiB);
  CHECK(reason_of(device).empty());
}

TEST_CASE("two layers show a step that is many times as large, and it stands beside another reason of size",
          "[explain][reasons]") {
  const auto result = [](std::string_view module, int64_t bytes) {
    return StepAllocation{.bytes = bytes,
                          .born = 1,
                          .category = Category::output,
                          .phase = Phase::forward,
                          .made = {.op = "aten::linear", .module = module}};
  };
  const LiveBlock output{.bytes = 64_MiB,
                         .category = Category::output,
                         .phase = Phase::forward,
                         .step = 5,
                         .made = {.op = "aten::linear", .module = "0", .source = "a.py:3"}};
  DeviceHistory device = at_oom({output, output});
  device.failure->where = {.op = "aten::linear", .module = "1", .source = "a.py:3"};
  device.complete = {.step = 4, .blocks = {result("0", 4_MiB), result("1", 4_MiB)}};
  device.step_allocations = {.step = 5, .blocks = {result("0", 64_MiB), result("1", 64_MiB)}};
  const ReasonFacts facts{.device = device, .growths = {}};
  const auto first = find_reason(facts);
  REQUIRE(first);
  CHECK(first->id == "batch_without_gradients");
  const auto second = find_second_reason(facts, *first);
  REQUIRE(second);
  CHECK(second->id == "larger_step");
  CHECK(
      second->text ==
      "this step works on more at once: results of its layers are 16 times as large as in the step before, 192.00 MiB "
      "so far (a.py:3)");
  CHECK(find_second_reason(facts, *second) == first);
  CHECK_FALSE(find_second_reason(facts, {.id = "kept_tensors", .text = {}}));  // growth is no matter of one step
}

TEST_CASE("steps each of which needs more than the one before work on data that grows", "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(100_MiB, 6)});
  device.state.step = 6;
  for (uint32_t step = 1; step <= 6; ++step)
    device.phases.push_back({.step = step, .phase = Phase::forward, .allocated_bytes = step * 20_MiB});
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "growing_steps");
  CHECK(reason->text ==
        "each step needs more than the one before, about 20.00 MiB, and leaves nothing behind: 20.00 MiB in step 1, "
        "100.00 MiB in step 5 ()");
  device.phases[2].allocated_bytes = 90_MiB;
  CHECK(reason_of(device) != "growing_steps");
}

TEST_CASE("what is repeated is named where only one tensor may be that", "[explain][reasons]") {
  const LiveBlock mask{.bytes = 4_MiB,
                       .requested_bytes = 4_MiB,
                       .category = Category::buffer,
                       .name = "causal_mask",
                       .shape = "[2048, 2048] bool"};
  DeviceHistory device = at_oom({mask});
  device.failure->requested_bytes = 192_MiB;
  device.failure->where = {.op = "aten::repeat", .module = "Model", .source = "model.py:4"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "repeated_copies");
  CHECK(reason->text == "aten::repeat at model.py:4 copies causal_mask [2048, 2048] bool 48 times: 192.00 MiB in all");
  LiveBlock other = mask;
  other.requested_bytes = 2_MiB;
  device.state.blocks.push_back(other);
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "aten::repeat at model.py:4 copies a tensor many times: 192.00 MiB in all");
  device.failure->where.op = "aten::reshape";  // of a view
  CHECK(
      find_reason({.device = device, .growths = {}})->text ==
      "aten::reshape at model.py:4 writes out a tensor that was expanded or unfolded: 192.00 MiB of at most 4.00 MiB");
}

TEST_CASE("a copy in a wider type is named with what it is copied from", "[explain][reasons]") {
  const LiveBlock masks{.bytes = 40_MiB,
                        .requested_bytes = 40_MiB,
                        .category = Category::output,
                        .made = {.op = "aten::logical_not", .source = "eval.py:3"},
                        .shape = "[160, 512, 512] bool"};
  DeviceHistory device = at_oom({masks});
  device.referrers = {{.variable = "variable 'masks' in f (eval.py:1)", .made = masks.made, .storage_bytes = 40_MiB}};
  device.failure->requested_bytes = 160_MiB;
  device.failure->where = {.op = "aten::to", .source = "eval.py:4"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "large_cast");
  CHECK(reason->text ==
        "aten::to at eval.py:4 makes a copy of 160.00 MiB in another type, 4 times as large as variable 'masks' in f "
        "(eval.py:1), [160, 512, 512] bool");
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

TEST_CASE("softmax of what no product made is no attention", "[explain][reasons]") {
  const LiveBlock scores{.bytes = 100_MiB,
                         .requested_bytes = 100_MiB,
                         .category = Category::output,
                         .made = {.op = "aten::softmax", .module = "head", .source = "net.py:3"},
                         .shape = "[4, 10, 640, 640] float32"};
  DeviceHistory device = at_oom({scores});
  CHECK(reason_of(device) == "attention_scores");
  device.step_allocations = {
      .step = 5, .blocks = {{.requested_bytes = 100_MiB, .born = 1, .made = {.op = "aten::conv2d", .module = "head"}}}};
  CHECK(reason_of(device) != "attention_scores");
  device.step_allocations.blocks.front().made.op = "aten::matmul";
  CHECK(reason_of(device) == "attention_scores");
}

TEST_CASE("graphs that too few nodes lead to are kept by nothing that variables reach", "[explain][reasons]") {
  const Where made{.op = "aten::silu", .module = "layer", .source = "cam.py:9"};
  const Growth growth{.kind = GrowthKind::retained_graph,
                      .bytes_per_step = 10_MiB,
                      .grown_bytes = 90_MiB,
                      .first_step = 1,
                      .last_step = 9,
                      .held = made,
                      .place_count = 10};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  device.looked_for_referrers = true;
  device.step_allocations.blocks = {{.bytes = 1_MiB, .in_graph = true, .made = made}};
  device.referrers = {{.variable = "variable 'outputs' in cam.py", .nodes = 200}};
  CHECK(reason_of(device, {growth}) == "graph_of_earlier_steps");
  device.referrers.front().nodes = 40;  // of the last step alone
  CHECK(reason_of(device, {growth}) == "reference_cycle");
  device.attribution.backward_bytes = 0;
  CHECK(reason_of(device, {growth}) == "reference_cycle");
}

TEST_CASE("outputs of a function that no variable leads to stay on its context, before a step has ended, too",
          "[explain][reasons]") {
  const LiveBlock output{.bytes = 20_MiB,
                         .category = Category::output,
                         .phase = Phase::forward,
                         .made = {.op = "OdeintMethod", .source = "ode.py:9"}};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(10, output));
  CHECK(reason_of(device) != "output_on_ctx");
  device.looked_for_referrers = true;
  CHECK(reason_of(device) == "output_on_ctx");
  device.referrers = std::vector<Referrer>(6, {.variable = "list 'kept' in a.py", .made = output.made});
  CHECK(reason_of(device) != "output_on_ctx");
}

TEST_CASE("a product of two tensors of data is all pairs, also beside a vocabulary", "[explain][reasons]") {
  const auto rows = [](int64_t count) {
    return LiveBlock{.bytes = count * 64 * 4, .requested_bytes = count * 64 * 4, .category = Category::output};
  };
  const LiveBlock table{.bytes = 2_MiB, .category = Category::parameter, .shape = "[10000, 64] float32"};
  DeviceHistory device = at_oom({table, rows(10000), rows(26000)});
  device.failure->requested_bytes = int64_t{10000} * 26000 * 4;
  device.failure->where = {.op = "aten::matmul", .source = "mine.py:3"};
  CHECK(reason_of(device) == "all_pairs");
  device.failure->where.module = "head";
  CHECK(reason_of(device) == "logits");
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

TEST_CASE("where no other row holds, the variable with the largest tensor is named", "[explain][reasons]") {
  const LiveBlock out{.bytes = 100_MiB,
                      .requested_bytes = 100_MiB,
                      .category = Category::unknown,
                      .made = {.op = "aten::zeros", .source = "apply.py:3"},
                      .shape = "[4, 2, 3276800] float32"};
  DeviceHistory device = at_oom({out});
  device.failure->phase = Phase::setup;
  device.failure->requested_bytes = 10_MiB;
  CHECK(reason_of(device).empty());
  device.referrers = {{.variable = "variable 'out' in f (apply.py:1)", .made = out.made, .storage_bytes = 100_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "variable 'out' in f (apply.py:1) has 100.00 MiB of it, [4, 2, 3276800] float32, made by aten::zeros at "
        "apply.py:3");
  device.state.blocks.front().made.op = "aten::to";  // it is data
  device.state.blocks.front().phase = Phase::setup;
  device.referrers.front().made.op = "aten::to";
  CHECK(reason_of(device) == "data_on_gpu");
}

TEST_CASE("a buffer that grows by another op than cat() is one too, a small one beside it is not named",
          "[explain][reasons]") {
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const Growth large{.kind = GrowthKind::growing_buffer,
                     .bytes_per_step = 20_MiB,
                     .grown_bytes = 90_MiB,
                     .held = {.op = "aten::new_full", .source = "eval.py:30"},
                     .referrer = "variable 'preds' in evaluate (eval.py:4)"};
  Growth small = large;
  small.bytes_per_step = 32;
  small.held = {.op = "aten::cat", .source = "eval.py:53"};
  const auto reason = find_reason({.device = device, .growths = {small, large}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "results are concatenated on the GPU in variable 'preds' in evaluate (eval.py:4), 20.00 MiB more per step "
        "(eval.py:30)");
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

TEST_CASE("a request inside of vmap is for all samples", "[explain][reasons]") {
  DeviceHistory device = at_oom({}, "/v/torch/_functorch/vmap.py:507 in _flat_vmap\n/a/train.py:68 in main");
  CHECK(reason_of(device) == "vectorized_over_all");
}

TEST_CASE("growth is named by what the program does", "[explain][reasons]") {
  const Where lstm{.op = "aten::lstm", .source = "train.py:16"};
  const Where cat{.op = "aten::cat", .source = "run.py:8"};
  const Where cache{.op = "aten::cat", .module = "h.0.attn", .source = "run.py:8"};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {{.kind = GrowthKind::retained_graph, .grown_bytes = 90_MiB, .places = {{.where = lstm}}}}) ==
        "recurrent_state");
  CHECK(reason_of(device, {{.kind = GrowthKind::growing_buffer, .grown_bytes = 90_MiB, .held = cat}}) ==
        "growing_buffer");
  CHECK(reason_of(device, {{.kind = GrowthKind::growing_buffer, .grown_bytes = 90_MiB, .held = cache}}) ==
        "key_value_cache");
}

TEST_CASE("a request is explained by the op and by the rows of its inputs", "[explain][reasons]") {
  DeviceHistory device =
      at_oom({{.bytes = 1_MiB, .shape = "[40000, 64] float32"}, {.bytes = 1_MiB, .shape = "[20000, 64] float32"}});
  device.failure->requested_bytes = int64_t{40000} * 20000 * 4;
  device.failure->where = {.op = "aten::cdist", .source = "pairs.py:3"};
  const auto pairs = find_reason({.device = device, .growths = {}});
  REQUIRE(pairs);
  CHECK(pairs->text == "all pairs at once at pairs.py:3: the result is [20000, 40000], for each pair of rows");
  device.failure->where = {.op = "aten::linalg_svd", .source = "galore.py:18"};
  CHECK(reason_of(device) == "full_matrices");
  device.failure->where = {.node = "EmbeddingBackward0", .op = "aten::embedding"};
  CHECK(reason_of(device) == "dense_embedding_gradients");
  device.failure->where = {.op = "aten::relu"};
  CHECK(reason_of(device) == "large_result");  // nothing more special
}

TEST_CASE("pairs are recognized by the sizes of what lives beside a large result", "[explain][reasons]") {
  const LiveBlock boxes{.bytes = 2_MiB,
                        .requested_bytes = int64_t{120000} * 4 * 4,
                        .category = Category::input,
                        .made = {.op = "aten::rand"}};
  LiveBlock truth = boxes;
  truth.requested_bytes = 700 * 4 * 4;
  DeviceHistory device = at_oom({boxes, truth});
  device.failure->requested_bytes = int64_t{120000} * 700 * 2 * 4;
  device.failure->where = {.op = "aten::max", .source = "boxes.py:3"};
  const auto pairs = find_reason({.device = device, .growths = {}});
  REQUIRE(pairs);
  CHECK(pairs->text ==
        "all pairs at once at boxes.py:3: the result is as large as [120000, 700, 2], for each pair of rows");
  // An op of equal sizes has an operand as large as its result beside it, here one of a layer.
  LiveBlock operand = boxes;
  operand.bytes = operand.requested_bytes = device.failure->requested_bytes;
  operand.made = {.op = "aten::conv2d"};
  device.state.blocks.push_back(operand);
  device.state.allocated_bytes += operand.bytes;
  CHECK(reason_of(device) == "large_result");
  device.state.blocks.back().made = {.op = "aten::sub"};
  CHECK(reason_of(device) == "all_pairs");
  device.state.blocks.back().category = Category::parameter;  // of which it may be a copy
  CHECK(reason_of(device) != "all_pairs");
}

TEST_CASE("parts of pairs are much smaller than the whole, and run again in backward where one follows",
          "[explain][reasons]") {
  LiveBlock triples{.bytes = 4_GiB,
                    .requested_bytes = 4_GiB,
                    .category = Category::output,
                    .made = {.op = "aten::sub", .source = "loss.py:3"},
                    .shape = "[1024, 1024, 1024] float32"};
  LiveBlock distances = triples;
  distances.bytes = distances.requested_bytes = 4_MiB;
  distances.shape = "[1024, 1024] float32";
  DeviceHistory device = at_oom({triples, distances});
  device.failure->requested_bytes = 4_GiB;
  device.failure->where = {.op = "aten::sub", .source = "loss.py:3"};
  const auto all = find_reason({.device = device, .growths = {}});
  REQUIRE(all);
  CHECK(all->text == "all pairs at once at loss.py:3: the result is [1024, 1024, 1024], for each three rows");
  CHECK(all->how.front() == "parts = [f(part, b) for part in a.split(128)]  # reduce each part before the next");
  device.step_allocations.blocks = {{.born = 1, .phase = Phase::forward, .in_graph = true}};
  const auto learned = find_reason({.device = device, .growths = {}});
  REQUIRE(learned);
  CHECK(learned->how.front().starts_with("parts = [checkpoint(f, part, b, use_reentrant=False) for part in"));
}

TEST_CASE("a layer of attention that asks for the memory of its scores has not multiplied yet", "[explain][reasons]") {
  const LiveBlock query{.bytes = 40_MiB,
                        .requested_bytes = 40_MiB,
                        .category = Category::output,
                        .made = {.op = "aten::clone", .module = "s1.attn1", .source = "unet.py:9"},
                        .shape = "[32, 16384, 40] float16"};
  DeviceHistory device = at_oom({query, query});
  device.failure->requested_bytes = int64_t{32} * 16384 * 16384 * 2;
  device.failure->where = {.op = "aten::empty", .module = "s1.attn1", .source = "unet.py:11"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "attention without a fused kernel: scores of length × length, the result is [32, 16384, 16384] at unet.py:11, "
        "16.00 GiB in all");
  device.failure->where.module = "s1.conv";
  CHECK(reason_of(device) != "attention_scores");
}

TEST_CASE("what each layer has as an attribute is a local variable of its forward()", "[explain][reasons]") {
  const LiveBlock bias{.bytes = 8_MiB,
                       .requested_bytes = 8_MiB,
                       .category = Category::output,
                       .phase = Phase::forward,
                       .step = 5,
                       .made = {.op = "aten::div", .source = "a.py:3"}};
  const auto line_for = [&](std::string_view variable) {
    DeviceHistory device = at_oom(std::vector<LiveBlock>(12, bias));
    device.referrers.assign(12, {.variable = variable, .made = bias.made, .bytes = 8_MiB, .storage_bytes = 8_MiB});
    const auto reason = find_reason({.device = device, .growths = {}});
    return reason ? reason->how.front() : std::string();
  };
  CHECK(line_for("attribute 'model._modules[\"layers\"]._modules[3].bias_of_positions' in main (a.py:9)")
            .ends_with("bias_of_positions = None  # once it has served, in forward(): there a local variable does"));
  CHECK(line_for("list 'self._modules[\"c2\"].seen' in forward (a.py:2)").starts_with("self.seen.append(x.cpu())"));
}

TEST_CASE("lists that hooks of layers fill are emptied, and kept caches of generations are dropped as a whole",
          "[explain][reasons]") {
  CHECK(lines_for_kept("attribute 'log[*].meta[\"out\"][\"past_key_values\"].layers[*].keys' in main (a.py:3)", false)
            .front()
            .starts_with("for _each in log: _each.meta[\"out\"][\"past_key_values\"] = None"));
}

TEST_CASE("what a product makes of an operand before it multiplies is no pair of rows", "[explain][reasons]") {
  const LiveBlock rows{.bytes = 40_MiB, .requested_bytes = 40_MiB, .category = Category::output};
  DeviceHistory device = at_oom({rows});
  device.failure->requested_bytes = 1280_MiB;
  device.failure->where = {.op = "aten::matmul", .inner = "aten::empty", .source = "mixture.py:7"};
  const auto copied = find_reason({.device = device, .growths = {}});
  REQUIRE(copied);
  CHECK(copied->text ==
        "aten::matmul at mixture.py:7 copies an operand for each row that it is multiplied with: 1.25 GiB of at most "
        "40.00 MiB");
  device.failure->where = {.op = "aten::einsum", .inner = "aten::mul", .source = "mixture.py:7"};
  const auto multiplied = find_reason({.device = device, .growths = {}});
  REQUIRE(multiplied);
  CHECK(multiplied->text ==
        "aten::einsum at mixture.py:7 multiplies two of its operands before it sums: their products take 1.25 GiB");
  device.failure->where.inner = "aten::bmm";  // its result
  CHECK(reason_of(device) != "large_intermediate");
}

TEST_CASE("results of all steps that are joined are there twice", "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  device.failure->where = {.op = "aten::cat", .source = "run.py:9"};
  const Growth growth{.kind = GrowthKind::kept_tensors,
                      .bytes_per_step = 10_MiB,
                      .grown_bytes = 90_MiB,
                      .held = {.op = "aten::relu", .source = "run.py:5"},
                      .referrer = "list 'seen' in main (run.py:2)"};
  const auto reason = find_reason({.device = device, .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->id == "joined_results");
  CHECK(reason->text ==
        "aten::cat at run.py:9 joins what list 'seen' in main (run.py:2) keeps of each step (10.00 MiB per step): "
        "64.00 MiB more, while all parts are still there");
  CHECK(reason->how.front().starts_with("seen.append(x.detach().cpu())"));
  device.failure->requested_bytes = 20_MiB;  // of other parts
  CHECK(reason_of(device, {growth}) == "kept_tensors");
}

TEST_CASE("a column and a row are pairs that may not be meant", "[explain][reasons]") {
  const LiveBlock column{.bytes = 1_MiB, .requested_bytes = 20000 * 4, .category = Category::output};
  DeviceHistory device = at_oom({column, column});
  device.failure->requested_bytes = int64_t{20000} * 20000 * 4;
  device.failure->where = {.op = "aten::sub", .source = "loss.py:3"};
  const auto pairs = find_reason({.device = device, .growths = {}});
  REQUIRE(pairs);
  CHECK(pairs->id == "all_pairs");
  CHECK(pairs->how.front().find("squeeze") != std::string::npos);
  device.state.blocks.insert(
      device.state.blocks.begin(),
      {.bytes = 2_MiB, .requested_bytes = 20000 * 16 * 4, .category = Category::input, .shape = "[20000, 16] float32"});
  CHECK(find_reason({.device = device, .growths = {}})->how.front().find("squeeze") != std::string::npos);
  device.failure->where.op = "aten::matmul";
  CHECK(find_reason({.device = device, .growths = {}})->how.front().starts_with("parts = "));
}

TEST_CASE("a tensor that is copied as a whole is data that belongs on the host", "[explain][reasons]") {
  DeviceHistory device = at_oom({});
  device.failure->phase = Phase::setup;
  device.failure->where = {.op = "aten::to", .source = "data.py:29"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "data_on_gpu");
  CHECK(reason->text == "a tensor of 64.00 MiB is copied to the GPU as a whole at data.py:29");
  device.failure->phase = Phase::forward;
  CHECK(reason_of(device).empty());
}

TEST_CASE("equal copies of one line that nothing has used yet are data, those of several sizes a model",
          "[explain][reasons]") {
  const LiveBlock image{.bytes = 5_MiB,
                        .requested_bytes = 5_MiB,
                        .phase = Phase::setup,
                        .made = {.op = "aten::to", .source = "cameras.py:3"}};
  std::vector<LiveBlock> blocks(40, image);
  CHECK(reason_of(at_oom(blocks)) == "data_on_gpu");
  for (size_t i = 0; i < blocks.size(); i += 2) blocks[i].requested_bytes = 4_MiB;
  CHECK(reason_of(at_oom(blocks)) != "data_on_gpu");
}

TEST_CASE("dense matrices and enlarged images are recognized by their ops", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 200_MiB, .category = Category::input, .made = {.op = "aten::to_dense"}}});
  CHECK(reason_of(device) == "dense_matrix");
  const LiveBlock image{.bytes = 200_MiB,
                        .requested_bytes = 200_MiB,
                        .category = Category::output,
                        .made = {.op = "aten::upsample_bilinear2d"}};
  device = at_oom({image});
  device.failure->requested_bytes = 50_MiB;  // a mask of it
  device.failure->where = {.op = "aten::gt", .source = "masks.py:3"};
  CHECK(reason_of(device) == "enlarged");
  const LiveBlock layer{.bytes = 80_MiB, .requested_bytes = 80_MiB, .category = Category::output};
  device.state.blocks.push_back(layer);
  CHECK(reason_of(device).empty());
}

TEST_CASE("zeros that are as many as classes for each label are masks", "[explain][reasons]") {
  const LiveBlock labels{.bytes = 2_MiB, .requested_bytes = 2_MiB, .category = Category::input};
  DeviceHistory device = at_oom({labels});
  device.failure->requested_bytes = 120_MiB;
  device.failure->where = {.op = "aten::zeros", .source = "loss.py:3"};
  CHECK(reason_of(device) == "one_hot");
  device.state.blocks.front().shape = "[2, 1, 64, 64, 64] float32";
  CHECK(reason_of(device) == "large_result");
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
  device.referrers = {{.variable = "variable 'net' in folds.py", .made = weight.made}};
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

TEST_CASE("sorting takes more than its tensor, and as many rows as words are no logits", "[explain][reasons]") {
  const Where quantile{.op = "aten::quantile", .source = "bins.py:3"};
  DeviceHistory device = at_oom({{.bytes = 200_MiB, .category = Category::temporary, .made = quantile}});
  device.failure->where = quantile;
  CHECK(reason_of(device) == "sort_temporaries");
  device = at_oom(
      {{.bytes = 2_MiB, .category = Category::parameter, .name = "user.weight", .shape = "[20000, 16] float32"}});
  device.failure->requested_bytes = int64_t{20000} * 20000 * 4;
  device.failure->where = {.op = "aten::linear"};
  CHECK(reason_of(device) == "logits");
  device.failure->where = {.op = "aten::add"};
  CHECK(reason_of(device) != "logits");
}

TEST_CASE("steps that are computed from the gradients of those before are differentiated twice", "[explain][reasons]") {
  Growth graphs{.kind = GrowthKind::retained_graph,
                .grown_bytes = 90_MiB,
                .places = {{.where = {.op = "aten::tanh"}, .bytes_per_step = 3_MiB}}};
  const Growth gradients{.kind = GrowthKind::kept_tensors,
                         .grown_bytes = 30_MiB,
                         .places = {{.where = {.op = "aten::tanh_backward"}, .bytes_per_step = 1_MiB}}};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {graphs}) == "graph_of_earlier_steps");
  CHECK(reason_of(device, {graphs, gradients}) == "create_graph");
  graphs.referrer = "list 'penalties' in train.py";
  CHECK(reason_of(device, {graphs, gradients}) == "graph_of_earlier_steps");
}

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

TEST_CASE("what a function of autograd leaves behind alone is an output on its context", "[explain][reasons]") {
  const Where made{.op = "Exponential", .module = "0", .source = "flow.py:9"};
  const Growth growth{.kind = GrowthKind::kept_tensors,
                      .bytes_per_step = 4_MiB,
                      .grown_bytes = 90_MiB,
                      .held = made,
                      .places = {{.where = made, .bytes_per_step = 4_MiB}}};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {growth}) == "output_on_ctx");
  Growth of_graph = growth;  // no backward has come, and the node has still what it saved
  of_graph.kind = GrowthKind::retained_graph;
  CHECK(reason_of(device, {of_graph}) != "output_on_ctx");
  device.looked_for_referrers = true;
  CHECK(reason_of(device, {of_graph}) == "output_on_ctx");
  of_graph.referrer = "list 'losses' in train.py";
  CHECK(reason_of(device, {of_graph}) != "output_on_ctx");
  Growth other = growth;
  other.held.op = "aten::relu";
  CHECK(reason_of(device, {growth, other}) != "output_on_ctx");
}

TEST_CASE("gradients are kept where no graph is built, and would let the request through", "[explain][reasons]") {
  const LiveBlock gradient{.bytes = 80_MiB, .category = Category::gradient};
  DeviceHistory device = at_oom({gradient, parameter("0.weight", true)});
  device.state.reserved_bytes = device.state.allocated_bytes;
  StepAllocation made = graph_block("0", 1_MiB);
  made.in_graph = false;
  device.step_allocations = {.step = 5, .blocks = {made}};
  CHECK(reason_of(device) == "gradients_kept");
  device.step_allocations.blocks.front().in_graph = true;
  CHECK(reason_of(device) != "gradients_kept");
  device.step_allocations.blocks.clear();
  CHECK(reason_of(device) != "gradients_kept");
  device.failure->phase = Phase::other;
  CHECK(reason_of(device) == "gradients_kept");
  device.failure->requested_bytes = 90_MiB;
  CHECK(reason_of(device) != "gradients_kept");
}

TEST_CASE("buffers that are most of all are named with the largest", "[explain][reasons]") {
  const LiveBlock buffer{
      .bytes = 300_MiB, .category = Category::buffer, .name = "receivers", .shape = "[202050, 450] float32"};
  CHECK(reason_of(at_oom({buffer, buffer})) == "large_buffers");
  CHECK(reason_of(at_oom({buffer, kept_activation(400_MiB, 4)})) != "large_buffers");
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

TEST_CASE("an evaluation without the autocast of training is named", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 100_MiB, .category = Category::output}});
  device.failure->where = {.op = "aten::conv2d", .module = "net", .source = "valid.py:3"};
  StepAllocation made = graph_block("net", 1_MiB);
  made.in_graph = false;
  device.step_allocations = {.step = 5, .blocks = {made}};
  made.made.autocast = "float16";
  device.complete = {.step = 4, .blocks = {made}};
  CHECK(reason_of(device) == "not_under_autocast");
  device.step_allocations.blocks.push_back(made);
  CHECK(reason_of(device) != "not_under_autocast");
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

TEST_CASE("weights, gradients and state that cannot fit together are the reason, whatever the batch", "[explain][reasons]") {
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

TEST_CASE("a first pass of a function that runs backward later is no evaluation", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(4, kept_activation(100_MiB, 5));
  for (LiveBlock& block : blocks) block.shape = "[1024, 64] float32";
  DeviceHistory device = at_oom(blocks);
  device.attribution.backward_bytes = 0;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.failure->names_backward = true;
  CHECK(reason_of(device) == "several_forward_passes");
  device.failure->modules_evaluate = true;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.state.blocks = {kept_activation(400_MiB, 5)};
  device.state.blocks.front().shape = "[1024, 64] float32";
  CHECK(find_many_rows({.device = device, .growths = {}}).has_value() == false);  // its ops made nothing in this step
}

TEST_CASE("a loop that is still filling a list or a dict is what runs out of memory", "[explain][reasons]") {
  const LiveBlock made{.bytes = 64_MiB,
                       .requested_bytes = 64_MiB,
                       .category = Category::unknown,
                       .phase = Phase::setup,
                       .made = {.op = "aten::zeros", .source = "fill.py:5"},
                       .shape = "[4096, 4096] float32"};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(9, made));
  device.failure->phase = Phase::setup;
  device.failure->step = 0;
  device.failure->where = {.op = "aten::zeros", .source = "fill.py:5"};
  device.attribution.backward_bytes = 0;
  const auto of_loop = find_reason({.device = device, .growths = {}});  // of a comprehension: no variable leads to its list yet
  REQUIRE(of_loop);
  CHECK(of_loop->id == "kept_tensors");
  CHECK(of_loop->text ==
        "aten::zeros at fill.py:5 runs again and again, and all that it makes stays: 9 tensors of 64.00 MiB so far");
  CHECK(of_loop->piles_up);
  device.referrers.assign(9, {.variable = "dict 'cache' in fill.py", .made = made.made, .storage_bytes = 64_MiB});
  const auto of_dict = find_reason({.device = device, .growths = {}});
  REQUIRE(of_dict);
  CHECK(of_dict->text.starts_with("dict 'cache' in fill.py keeps 9 results at fill.py:5"));
  device.failure->where.source = "fill.py:9";
  for (Referrer& one : device.referrers) one.variable = "list 'cache' in fill.py";
  const auto in_advance = find_reason({.device = device, .growths = {}});
  REQUIRE(in_advance);
  CHECK(in_advance->text.find("made in advance") != std::string::npos);
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

TEST_CASE("a step of several passes is no evaluation where the step before had as many", "[explain][reasons]") {
  DeviceHistory device = at_oom(std::vector<LiveBlock>(6, kept_activation(100_MiB, 5)));
  device.state.blocks.push_back(parameter("0.weight", true));
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.complete = {.step = 4, .blocks = std::vector<StepAllocation>(6, graph_block("0.act", 100_MiB))};
  CHECK(reason_of(device) == "several_forward_passes");
}

TEST_CASE("what variables refer to themselves is kept by them, not by a graph", "[explain][reasons]") {
  Growth growth{.kind = GrowthKind::retained_graph, .grown_bytes = 90_MiB, .held = {.node = "MmBackward0"}};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {growth}) == "create_graph");
  growth.referred_bytes = 80_MiB;
  CHECK(reason_of(device, {growth}) == "kept_tensors");
}

TEST_CASE("where only a free block is missing, tensors that stay are the reason", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.address = 1,
                                  .bytes = 100_MiB,
                                  .requested_bytes = 100_MiB,
                                  .made = {.op = "aten::zeros", .source = "a.py:3"}}});
  device.state.segments = {{.bytes = 200_MiB, .used_bytes = 100_MiB, .holes = 2, .blocked_by = {1}}};
  const auto reason = find_reason({.device = device, .growths = {}, .cause = CauseKind::fragmentation});
  REQUIRE(reason);
  CHECK(reason->id == "fragmentation");
  CHECK(reason->text ==
        "what is free lies in 2 pieces between tensors that stay, as those made at "
        "a.py:3");
  device.referrers = {{.variable = "dict 'pool' in embed (a.py:1)",
                       .made = device.state.blocks.front().made,
                       .storage_bytes = 100_MiB}};
  const auto kept = find_reason({.device = device,
                                 .growths = {{.bytes_per_step = 1_MiB, .grown_bytes = 9_MiB}},
                                 .cause = CauseKind::fragmentation});
  REQUIRE(kept);
  CHECK(kept->text ==
        "what is free lies in 2 pieces between tensors that dict 'pool' in embed (a.py:1) keeps, as those made at "
        "a.py:3");
  CHECK(kept->how.front() ==
        "pool[key] = x.detach().cpu()  # of a scalar: x.item(); where it is read again: .to(device)");
}

TEST_CASE("a batch goes through a model without gradients in an evaluation, too", "[explain][reasons]") {
  const LiveBlock output{.bytes = 300_MiB, .category = Category::output, .made = {.op = "aten::conv2d", .module = "0"}};
  DeviceHistory device = at_oom({output, parameter("0.weight", true)});
  device.failure->requested_bytes = 300_MiB;
  device.failure->where = {.op = "aten::relu", .module = "1", .source = "test.py:3"};
  CHECK(reason_of(device).empty());  // nothing tells whether this step builds a graph
  StepAllocation made = graph_block("0", 300_MiB);
  device.step_allocations = {.step = 5, .blocks = {made}};
  CHECK(reason_of(device).empty());
  made.in_graph = false;
  device.step_allocations.blocks = {made};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "the whole batch goes through the model at once, without gradients: 600.00 MiB at layer '1' (test.py:3)");
}

TEST_CASE("attention without a fused kernel is recognized by square results of its ops", "[explain][reasons]") {
  const LiveBlock scores{.bytes = 128_MiB,
                         .category = Category::activation,
                         .made = {.op = "aten::softmax", .module = "attention", .source = "attention.py:7"},
                         .shape = "[2, 8, 2048, 2048] float32"};
  CHECK(reason_of(at_oom({scores})) == "attention_scores");
  LiveBlock image = scores;
  image.made.op = "aten::conv2d";
  CHECK(reason_of(at_oom({image})).empty());
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

TEST_CASE("a fix of every reason has a row", "[explain][reasons]") {
  for (const char* id :
       {"finer_checkpoints", "autocast_without_cache", "fused_or_single", "retry_outside_except", "one_graph_pool",
        "fused_attention", "class_indices", "loss_in_chunks", "no_sparse_gradient", "drop_models", "load_to_host",
        "data_on_host", "delete_outputs", "split_batch", "stop_growth"}) {
    CHECK(find_fix(id) != nullptr);
  }
}

TEST_CASE("double precision is a reason where half of the bytes have it", "[explain][reasons]") {
  CHECK(reason_of(at_oom({{.bytes = 200_MiB, .shape = "[1024] float64"}})) == "float64");
  CHECK(reason_of(at_oom({{.bytes = 20_MiB, .shape = "[1024] float64"}})).empty());
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

TEST_CASE("where gradients are wanted of an input, a model in evaluation mode is differentiated",
          "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(300_MiB, 5)}, "/a/net.py:9 in forward\n/a/probe.py:40 in draw");
  device.failure->modules_evaluate = true;
  device.referrers = {
      {.variable = "variable 'image' in draw (probe.py:30)", .storage_bytes = 1_MiB, .wants_gradient = true}};
  CHECK(reason_of(device) != "evaluation_keeps_graphs");
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

TEST_CASE("adapters inside of a frozen layer are trained", "[explain][reasons]") {
  DeviceHistory device = at_oom({parameter("layers.0.q.weight", false), parameter("layers.0.q.A", true)});
  device.state.blocks.front().saved_by = std::vector<Where>{{.module = "layers.0.q", .source = "net.py:5"}};
  device.state.allocated_bytes += 200_MiB;
  device.step_allocations = {.step = 5, .blocks = {graph_block("layers.0.q", 200_MiB)}};
  CHECK(reason_of(device).empty());
}

TEST_CASE("what the same line of a package has joined before is concatenated, though no variable leads to it",
          "[explain][reasons]") {
  const Where joined{.op = "aten::cat", .source = "train.py:46", .inner_source = "trainer_pt_utils.py:86"};
  DeviceHistory device =
      at_oom({{.bytes = 230_MiB, .requested_bytes = 230_MiB, .category = Category::output, .made = joined}});
  device.failure->requested_bytes = 300_MiB;
  device.failure->where = joined;
  device.step_allocations = {.step = 5,
                             .blocks = {{.bytes = 1_MiB, .born = 1, .made = {.op = "aten::relu", .module = "0"}}}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "growing_buffer");
  CHECK(reason->text ==
        "results are concatenated on the GPU at train.py:46: 230.00 MiB so far, and both are there while aten::cat "
        "joins them");
  device.state.blocks.front().made.inner_source = "modeling.py:9";
  CHECK(reason_of(device) != "growing_buffer");
}

TEST_CASE("a result that one line makes larger each time is concatenated", "[explain][reasons]") {
  LiveBlock before{.bytes = 88_MiB,
                   .requested_bytes = 88_MiB,
                   .category = Category::output,
                   .step = 5,
                   .made = {.op = "aten::cat", .source = "eval.py:9"},
                   .shape = "[384, 60000] float32"};
  DeviceHistory device = at_oom({before});
  device.failure->where = {.op = "aten::cat", .source = "eval.py:9"};
  device.failure->requested_bytes = 102_MiB;
  CHECK(reason_of(device) != "growing_buffer");  // nobody keeps it
  device.referrers = {
      {.variable = "variable 'preds' in evaluate (eval.py:3)", .made = before.made, .storage_bytes = 88_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "growing_buffer");
  CHECK(reason->text ==
        "results are concatenated on the GPU in variable 'preds' in evaluate (eval.py:3) at eval.py:9: 88.00 MiB, "
        "[384, 60000] float32 so far, and both are there while aten::cat joins them");
  device.failure->requested_bytes = 500_MiB;  // parts are joined once
  CHECK(reason_of(device) != "growing_buffer");
}

TEST_CASE("weights that are cast one after the other are named with their model", "[explain][reasons]") {
  const LiveBlock wide{
      .bytes = 60_MiB, .requested_bytes = 60_MiB, .made = {.op = "aten::to", .source = "prepare.py:4"}};
  const LiveBlock narrow{.bytes = 32_MiB, .requested_bytes = 32_MiB, .made = {.op = "aten::to", .source = "load.py:4"}};
  DeviceHistory device = at_oom({wide, wide, narrow});
  device.failure->where = {.op = "aten::to", .source = "prepare.py:4"};
  CHECK(reason_of(device) != "widened_weights");
  device.referrers = {{.variable = "dict 'model._modules[\"a\"]._parameters' in main (a.py:1)",
                       .made = wide.made,
                       .storage_bytes = 60_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "widened_weights");
  CHECK(
      reason->text ==
      "the parameters of 'model' are copied into a type twice as wide at prepare.py:4: 120.00 MiB so far, 60.00 MiB of "
      "them more than before");
  device.state.blocks.pop_back();  // a model of one type that goes to the GPU
  CHECK(reason_of(device) != "widened_weights");
}

TEST_CASE("images of millions of pixels are named with their size", "[explain][reasons]") {
  LiveBlock image{.bytes = 137_MiB, .category = Category::input, .step = 5, .shape = "[1, 3, 3000, 4000] float32"};
  LiveBlock features = kept_activation(300_MiB, 5);
  features.made.op = "aten::conv2d";
  features.step = 5;
  DeviceHistory device = at_oom({image, features});
  device.failure->where = {.op = "aten::conv2d", .module = "stem.0", .source = "net.py:9"};
  device.failure->requested_bytes = 300_MiB;
  device.state.blocks.push_back(parameter("stem.0.weight", true));
  device.state.blocks.back().shape = "[64, 3, 7, 7] float32";
  CHECK(reason_of(device) != "large_images");  // without a graph tiles of them will do
  device.step_allocations = {.step = 5, .blocks = {graph_block("stem.0", 300_MiB)}};
  CHECK(reason_of(device) == "large_images");
  device.state.blocks.front().shape = "[1, 3, 300, 400] float32";
  CHECK(reason_of(device) != "large_images");
}

TEST_CASE("caches of all positions in each layer are no masks", "[explain][reasons]") {
  const LiveBlock cache{.bytes = 40_MiB,
                        .requested_bytes = 40_MiB,
                        .category = Category::buffer,
                        .made = {.op = "aten::zeros", .source = "cache.py:3"},
                        .name = "layers.0.attn.kv_cache.k",
                        .shape = "[1, 8, 131072, 64] bfloat16"};
  const auto reason = find_reason({.device = at_oom({cache, cache, cache, cache}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->fix == "smaller_cache");
  CHECK(reason->text ==
        "4 caches of the model's layers are made for all positions at once at cache.py:3: 40.00 MiB each, "
        "[1, 8, 131072, 64] bfloat16, 160.00 MiB");
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

TEST_CASE("lines to write have a module's attributes as the program does", "[explain][reasons]") {
  CHECK(as_written("self._modules[\"ssim\"].preds") == "self.ssim.preds");
  CHECK(as_written("net._modules[3]._modules[*].seen") == "net[3][*].seen");
  CHECK(as_written("history") == "history");
  CHECK(line_for_kept("list 'self._modules[\"ssim\"].preds' in f (a.py:3)", false) ==
        "self.ssim.preds.append(x.detach().cpu())  # of a scalar: x.item(); where it is read again: .to(device)");
}

TEST_CASE("one large result of the program itself is named by its op", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 60_MiB}});
  device.failure->where = {.op = "aten::softmax", .source = "a.py:7"};
  CHECK(reason_of(device) == "large_result");
  const LiveBlock grid{.bytes = 128_MiB, .requested_bytes = 128_MiB, .made = {.op = "aten::stack", .source = "a.py:6"}};
  device.state.blocks.push_back(grid);
  device.referrers = {{.variable = "variable 'grid' in paste (a.py:2)", .made = grid.made, .storage_bytes = 128_MiB}};
  device.failure->where.inner = "aten::empty";  // as most ops begin
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(
      reason->text ==
      "one tensor of 64.00 MiB: aten::softmax at a.py:7 makes it at once, beside variable 'grid' in paste (a.py:2) of "
      "128.00 MiB, which aten::stack makes at a.py:6");
  CHECK(reason->how.front().starts_with("labels = "));
  device.referrers.clear();
  device.failure->where.module = "head";  // a layer's
  CHECK(reason_of(device).empty());
}

TEST_CASE("graphs of a few earlier steps that a list leads to are its", "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(100_MiB, 2), kept_activation(100_MiB, 3)});
  device.state.step = 5;
  device.referrers = {{.variable = "list 'history' in train.py", .nodes = 40}};
  CHECK(reason_of(device) == "graph_of_earlier_steps");
  device.state.blocks.back().step = 2;
  CHECK(reason_of(device).empty());
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

TEST_CASE("much that a broadcast made of little is all pairs, if no graph is built", "[explain][reasons]") {
  const LiveBlock operand{.bytes = 1_MiB, .requested_bytes = 1_MiB, .category = Category::input};
  DeviceHistory device = at_oom({operand});
  device.failure->requested_bytes = 64_MiB;
  device.failure->where = {.op = "aten::sigmoid", .module = "head", .source = "a.py:7"};
  StepAllocation made{.bytes = 64_MiB,
                      .requested_bytes = 64_MiB,
                      .born = 1,
                      .made = {.op = "aten::mul", .module = "head", .source = "a.py:6"}};
  device.step_allocations = {.step = 5, .blocks = {made}};
  CHECK(reason_of(device) == "all_pairs");
  made.made.op = "aten::index";
  device.step_allocations.blocks = {made};
  CHECK(reason_of(device) == "enlarged");
  made.in_graph = true;
  device.step_allocations.blocks = {made};
  CHECK(reason_of(device) == "enlarged");  // a layer's messages
  device.step_allocations.blocks[0].made.module = {};
  CHECK(reason_of(device).empty());  // a batch may be selected
}

TEST_CASE("an index for each row of a table that is taken for all rows makes pairs", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 128_MiB,
                                  .requested_bytes = int64_t{16384} * 2000 * 4,
                                  .category = Category::output,
                                  .shape = "[16384, 2000] float32"}});
  device.failure->where = {.op = "aten::index", .source = "perplexity.py:44"};
  device.failure->requested_bytes = int64_t{16384} * 16384 * 4;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "indexed_pairs");
  CHECK(reason->text ==
        "each of 16384 indices is looked up in each of 16384 rows at perplexity.py:44: [16384, 16384] of a tensor, "
        "[16384, 2000] float32, while one of each row is on the diagonal");
  device.failure->requested_bytes = int64_t{30000} * 16384 * 4;
  CHECK(reason_of(device) != "indexed_pairs");
}

TEST_CASE("parameters of which each step has more are a model that grows", "[explain][reasons]") {
  const Where joined{.op = "aten::cat", .source = "splat.py:95"};
  DeviceHistory device = at_oom({{.bytes = 100_MiB, .category = Category::parameter, .made = joined, .trained = true},
                                 {.bytes = 200_MiB, .category = Category::optimizer_state, .made = joined}});
  const Growth growth{.kind = GrowthKind::growing_buffer,
                      .bytes_per_step = 5_MiB,
                      .grown_bytes = 250_MiB,
                      .held = joined,
                      .referrer = "defaultdict 'optimizer.state' in train (splat.py:7)"};
  const auto reason = find_reason({.device = device, .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->id == "growing_model");
  CHECK(reason->text ==
        "the model itself grows: aten::cat makes parameters and the optimizer's state larger at splat.py:95, 5.00 MiB "
        "more per step, and their gradients with them");
  for (LiveBlock& block : device.state.blocks) block.category = Category::output;
  CHECK(reason_of(device, {growth}) == "growing_buffer");
}

TEST_CASE("lists that one loop fills keep their results together", "[explain][reasons]") {
  DeviceHistory device = at_oom({});
  for (const char* line : {"net.py:4", "net.py:5", "net.py:6"}) {
    for (int i = 0; i < 10; ++i) {
      device.state.blocks.push_back({.bytes = 6_MiB,
                                     .requested_bytes = 6_MiB,
                                     .category = Category::output,
                                     .step = 5,
                                     .made = {.op = "aten::mul", .source = line}});
      device.state.allocated_bytes += 6_MiB;
    }
  }
  device.failure->requested_bytes = 6_MiB;
  device.referrers = {{.variable = "list 'outputs' in predict (eval.py:7)",
                       .made = {.op = "aten::mul", .source = "net.py:4"},
                       .storage_bytes = 6_MiB},
                      {.variable = "list 'masks' in predict (eval.py:7)",
                       .made = {.op = "aten::mul", .source = "net.py:5"},
                       .storage_bytes = 6_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "kept_tensors");
  CHECK(reason->bytes == 120_MiB);  // the third line's have no referrer
  CHECK(reason->text.find("list 'masks' in predict (eval.py:7) and outputs keep 20 results") == 0);
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

namespace {

LiveBlock moved_weight(std::string_view line) {
  return {.bytes = 40_MiB,
          .requested_bytes = 40_MiB,
          .category = Category::input,
          .made = {.op = "aten::to", .source = line},
          .shape = "[10, 10] float32"};
}

/// As a model goes to the GPU at load.py:9.
DeviceHistory while_moving(std::vector<LiveBlock> before) {
  before.insert(before.end(), 4, moved_weight("load.py:9"));
  DeviceHistory device = at_oom(std::move(before));
  device.failure->phase = Phase::other;
  device.failure->where = {.op = "aten::to", .source = "load.py:9"};
  device.referrers = {{.variable = "dict 'model._modules[0]._parameters' in load (load.py:3)",
                       .made = {.op = "aten::to", .source = "load.py:9"},
                       .storage_bytes = 40_MiB}};
  return device;
}

}  // namespace

TEST_CASE("a model that goes to the GPU beside the one in training leaves that one there", "[explain][reasons]") {
  LiveBlock before = parameter("layers.0.weight", true), state{.bytes = 200_MiB, .category = Category::optimizer_state};
  before.bytes = 100_MiB;
  const auto reason = find_reason({.device = while_moving({before, state}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->fix == "model_on_host");
  CHECK(reason->text.find("beside the one in training") != std::string::npos);
}

TEST_CASE("of a model that is gone no shape is known, and its parameters are twins all the same", "[explain][reasons]") {
  LiveBlock now = parameter("layers.0.weight", true), gone = parameter("layers.0.weight", true);
  now.bytes = gone.bytes = now.requested_bytes = gone.requested_bytes = 100_MiB;
  gone.shape = {};
  const auto reason = find_several_models({.device = at_oom({now, gone}), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("2 models of the same layers are alive"));
  CHECK(reason->piles_up);
}

TEST_CASE("a graph that a variable has beside a backward pass is named by it", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(5, LiveBlock{.bytes = 100_MiB,
                                             .category = Category::output,
                                             .phase = Phase::forward,
                                             .step = 5,
                                             .made = {.op = "aten::relu", .module = "main.3", .source = "gan.py:34"}});
  DeviceHistory device = at_oom(blocks);
  device.failure->phase = Phase::backward;
  device.failure->where = {.node = "ConvolutionBackward0", .op = "aten::conv2d", .module = "main.2", .source = "gan.py:50"};
  device.referrers = {{.variable = "variable 'fake' in train_critic (gan.py:58)",
                       .made = {.op = "aten::tanh", .module = "main.9", .source = "gan.py:34"},
                       .nodes = 12,
                       .bytes = 8_MiB}};
  CHECK_FALSE(find_graph_beside_backward({.device = device, .growths = {}}));  // no step before tells
  device.complete = {.step = 4, .blocks = {graph_block("main.3", 1_MiB)}};
  const auto reason = find_graph_beside_backward({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "the graph behind 'fake' is no part of this backward pass, nor of that of the step before, and holds 500.00 MiB "
        "(gan.py:34)");
  CHECK(reason->kept_by == "variable 'fake' in train_critic (gan.py:58)");
  StepAllocation ran = graph_block("main.3", 1_MiB);  // in the step before
  ran.phase = Phase::backward;
  ran.made.source = "gan.py:34";
  device.complete.blocks.push_back(ran);
  CHECK_FALSE(find_graph_beside_backward({.device = device, .growths = {}}));
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
        "the optimizer's step makes 2 tensors as large as table, [512, 512] float32, 200.00 MiB in all, above the weight, "
        "its gradient and its state (aten::div at train.py:95)");
  device.failure->requested_bytes = 50_MiB;
  CHECK_FALSE(find_optimizer_temporaries({.device = device, .growths = {}}));
}

TEST_CASE("who has the graph in a variable calls what is to run without one", "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(100_MiB, 5), kept_activation(100_MiB, 5)},
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

TEST_CASE("all lists that one loop fills are named where tensors of each step stay", "[explain][reasons]") {
  const Where logits{.op = "aten::add", .module = "net", .source = "epoch.py:47"}, labels{.op = "aten::to", .source = "epoch.py:45"};
  const Growth growth{.bytes_per_step = 20_MiB,
                      .grown_bytes = 200_MiB,
                      .first_step = 1,
                      .last_step = 11,
                      .held = logits,
                      .places = {{.where = logits, .bytes_per_step = 10_MiB}, {.where = labels, .bytes_per_step = 10_MiB}},
                      .place_count = 2,
                      .referrer = "list 'scores' in train (epoch.py:41)",
                      .referred_bytes = 200_MiB};
  DeviceHistory device = at_oom({{.bytes = 200_MiB, .category = Category::output}});
  device.referrers.assign(9, {.variable = "list 'truth' in train (epoch.py:41)", .made = labels, .bytes = 10_MiB});
  const auto reason = find_kept_tensors({.device = device, .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("list 'scores' in train (epoch.py:41), and list 'truth' in train (epoch.py:41) keep"));
  REQUIRE(reason->how.size() == 2);
  CHECK(reason->how.back().starts_with("truth.append(x.detach().cpu())"));
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

TEST_CASE("first layers that keep all pixels are named by their channels", "[explain][reasons]") {
  const LiveBlock images{.bytes = 7_MiB,
                         .requested_bytes = int64_t{12} * 3 * 224 * 224 * 4,
                         .category = Category::input,
                         .made = {.op = "aten::to", .source = "train.py:5"},
                         .shape = "[12, 3, 224, 224] float32"};
  LiveBlock result{.bytes = 441_MiB,
                   .requested_bytes = int64_t{12} * 192 * 224 * 224 * 4,
                   .category = Category::output,
                   .step = 5,
                   .made = {.op = "aten::conv2d", .module = "prelayer.0", .source = "net.py:9"}};
  LiveBlock kernel = parameter("prelayer.0.weight", true);
  kernel.shape = "[192, 3, 3, 3] float32";
  DeviceHistory device = at_oom({images, result, kernel});
  device.failure->where = {.op = "aten::batch_norm", .module = "prelayer.1", .source = "net.py:9"};
  device.failure->requested_bytes = result.requested_bytes;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "large_images");
  CHECK(reason->text ==
        "layers work at all pixels of the images, [12, 3, 224, 224] float32: what has their size takes 882.00 MiB, as "
        "the result of 'prelayer.0' with 192 channels (net.py:9)");
  device.state.blocks[1].shape = "[12, 768, 112, 112] float32";
  CHECK(reason_of(device) != "large_images");
  device.state.blocks[0].shape = "[1200, 3, 22, 22] float32";  // small images, a large batch
  device.state.blocks[1].shape = "[1200, 192, 22, 22] float32";
  CHECK(reason_of(device) != "large_images");
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

TEST_CASE("the line to write names optimizers that a list keeps, and modules that a model has one more of each time",
          "[explain][reasons]") {
  const auto line = [](std::string_view variable) { return line_for_kept(variable, false); };
  CHECK(
      line("defaultdict 'trainer._optimizers[*].state' in main (run.py:3)").starts_with("trainer._optimizers.clear()"));
  CHECK(line("dict 'model._modules[*]._modules[\"lora\"]._modules[\"run-0\"]._parameters' in main (run.py:3)")
            .starts_with("for _each in model: del _each.lora[\"run-0\"]"));
  CHECK(line("dict 'nets[0]._modules[\"head\"]._parameters' in main (run.py:3)").starts_with("nets.clear()"));
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

TEST_CASE("large tensors on the way of an einsum of small operands are explained by the order of these",
          "[explain][reasons]") {
  LiveBlock operand = kept_activation(1_MiB, 5);
  LiveBlock made = kept_activation(200_MiB, 5);
  made.made = {.op = "aten::einsum", .source = "net.py:4"};
  DeviceHistory device = at_oom({operand, made});
  device.failure->requested_bytes = 300_MiB;
  device.failure->where = made.made;
  CHECK(
      find_reason({.device = device, .growths = {}})->text ==
      "aten::einsum at net.py:4 makes tensors of up to 300.00 MiB on its way, and no tensor that it is given has more "
      "than 1.00 MiB: the order of its operands decides");
  device.state.blocks.front().bytes = 100_MiB;
  CHECK(reason_of(device) != "large_intermediate");
}

TEST_CASE("a tensor as large as all parameters is said to be so", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = 480_MiB;
  DeviceHistory device = at_oom({weight});
  device.failure->requested_bytes = 489_MiB;
  device.failure->where = {.op = "aten::empty", .source = "load.py:3"};
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "one tensor of 489.00 MiB, as much as all parameters take: aten::empty at load.py:3 makes it at once");
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

TEST_CASE("shapes without elements are no images and no tables", "[explain][reasons]") {
  DeviceHistory device = at_oom({parameter("0.weight", true)});
  for (const char* shape : {"[8, 0, 64, 64] float32", "[0, 3, 64, 64] float32", "[2048, 0] float32"}) {
    device.state.blocks.push_back(
        {.bytes = 300_MiB, .requested_bytes = 300_MiB, .category = Category::input, .shape = shape});
  }
  device.state.blocks.front().shape = "[64, 3, 3, 3] float32";
  CHECK(reason_of(device) != "large_images");
  device.failure->where.op = "aten::index";
  CHECK(reason_of(device) != "indexed_pairs");
}

TEST_CASE("what is joined is counted of its own container, and not of others that are as long", "[explain][reasons]") {
  DeviceHistory device = at_oom({});
  for (const char* line : {"eval.py:4", "eval.py:5"}) {
    for (int i = 0; i < 3; ++i) {
      device.state.blocks.push_back({.bytes = 50_MiB,
                                     .requested_bytes = 50_MiB,
                                     .category = Category::output,
                                     .step = 5,
                                     .made = {.op = "aten::mul", .source = line}});
      device.state.allocated_bytes += 50_MiB;
    }
  }
  device.referrers = {{.variable = "list 'outputs' in predict (eval.py:1)",
                       .made = {.op = "aten::mul", .source = "eval.py:4"},
                       .storage_bytes = 50_MiB},
                      {.variable = "list 'masks' in predict (eval.py:1)",
                       .made = {.op = "aten::mul", .source = "eval.py:5"},
                       .storage_bytes = 50_MiB}};
  device.failure->where = {.op = "aten::cat", .source = "eval.py:9"};
  device.failure->requested_bytes = 150_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "joined_results");
  CHECK(reason->text.find("joins the 3 tensors of ") != std::string::npos);
}

TEST_CASE("what is left to say of a step of training is how many rows it works on, and what each keeps",
          "[explain][reasons]") {
  LiveBlock kept = kept_activation(100_MiB, 5);
  kept.shape = "[20480, 1280] float32";
  DeviceHistory device = at_oom({kept, kept, parameter("0.weight", true)});
  device.state.step = 5;
  device.attribution.backward_bytes = 0;
  device.step_allocations = {.step = 5, .blocks = {graph_block("0.act", 100_MiB)}};
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "many_rows");
  CHECK(reason->fix == "fewer_rows");
  CHECK(reason->text ==
        "one forward pass works on 20480 rows at once, as '0.act' does, [20480, 1280] float32, and keeps 200.00 MiB "
        "for backward, as nothing is checkpointed: 10.00 KiB for each");
  device.packed_tensors = 1;
  CHECK(find_reason({.device = device, .growths = {}})->text.ends_with("for backward: 10.00 KiB for each"));
  device.packed_tensors = 0;
  for (LiveBlock& block : device.state.blocks) block.shape = "[512, 511, 100] float32";
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("one forward pass works on 512 × 511 rows, all pairs of 512, at once"));
  for (LiveBlock& block : device.state.blocks) block.shape = "[4, 640, 2048] float32";
  CHECK(find_reason({.device = device, .growths = {}})
            ->fix.empty());  // half the batch, and shorter sequences, are known fixes
  for (LiveBlock& block : device.state.blocks) block.shape = {};
  CHECK(reason_of(device).empty());
}

TEST_CASE("a forward pass of a program without an optimizer may be one without backward", "[explain][reasons]") {
  LiveBlock kept = kept_activation(100_MiB, 5);
  kept.shape = "[20480, 1280] float32";
  DeviceHistory device = at_oom({kept, kept});
  device.state.step = 5;
  device.attribution.backward_bytes = 0;
  device.step_allocations = {.step = 5, .blocks = {graph_block("0.act", 100_MiB)}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.ends_with("no optimizer is there, and without backward, torch.no_grad() keeps none"));
  CHECK(reason->fix == "no_grad_in_evaluation");
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

TEST_CASE("the program's own product of rows and a table is all pairs of them", "[explain][reasons]") {
  LiveBlock table = parameter("items.weight", true);
  table.shape = "[28000, 64] float32";
  const LiveBlock users{.bytes = 3_MiB,
                        .requested_bytes = int64_t{12000} * 64 * 4,
                        .category = Category::input,
                        .made = {.op = "aten::embedding", .source = "rank.py:4"},
                        .shape = "[12000, 64] float32"};
  DeviceHistory device = at_oom({table, users});
  device.attribution.backward_bytes = 0;
  device.failure->phase = Phase::other;
  device.failure->requested_bytes = int64_t{12000} * 28000 * 4;
  device.failure->where = {.op = "aten::matmul", .source = "rank.py:5"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text == "all pairs at once at rank.py:5: the result is [12000, 28000], for each pair of rows");
}

TEST_CASE("graphs that a container collects keep what backward made to be differentiated, too", "[explain][reasons]") {
  const Growth gradients{.kind = GrowthKind::kept_tensors,
                         .bytes_per_step = 3_MiB,
                         .grown_bytes = 60_MiB,
                         .held = {.node = "MulBackward0", .op = "aten::mul", .source = "pde.py:9"},
                         .places = {{.where = {.op = "aten::mul"}, .bytes_per_step = 3_MiB, .differentiated = true}}};
  Growth graphs{.kind = GrowthKind::retained_graph,
                .bytes_per_step = 2_MiB,
                .grown_bytes = 40_MiB,
                .held = {.op = "aten::tanh", .source = "pde.py:7"},
                .places = {{.where = {.op = "aten::tanh"}, .bytes_per_step = 2_MiB}}};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  device.state.blocks.push_back({.bytes = 1_MiB, .category = Category::gradient});
  device.looked_for_referrers = true;
  CHECK(reason_of(device, {gradients, graphs}) == "create_graph");
  graphs.referrer = "dict 'history' in train (pde.py:3)";
  const std::vector<Growth> growths{gradients, graphs};
  const auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->text ==
        "dict 'history' in train (pde.py:3) keeps the graph of each step at pde.py:7, 5.00 MiB per step");
  CHECK(reason->bytes == 100_MiB);
}

TEST_CASE("a variable of forward() leads to earlier calls by a state of a module", "[explain][reasons]") {
  Growth growth{.kind = GrowthKind::retained_graph,
                .bytes_per_step = 10_MiB,
                .grown_bytes = 100_MiB,
                .held = {.op = "aten::sub", .module = "conv.2", .source = "snn.py:7"},
                .referrer = "variable 'spikes' in forward (snn.py:20)"};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  device.attribution.backward_bytes = 0;
  device.referrers = {{.variable = growth.referrer, .nodes = 900, .bytes = 4},
                      {.variable = "attribute 'net._modules[\"conv\"]._modules[2].v' in main (snn.py:31)",
                       .made = {.op = "aten::add", .source = "snn.py:8"},
                       .nodes = 4,
                       .bytes = 1_MiB}};
  const std::vector<Growth> growths{growth};
  const auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->id == "recurrent_state");
  CHECK(reason->text.starts_with("a state that modules keep from one call to the next, net.conv[2].v,"));
  growth.referrer = "variable 'total' in main (snn.py:31)";
  CHECK(reason_of(device, {growth}) == "evaluation_keeps_graphs");
}

TEST_CASE("losses in a list are said to wait for a backward, where none for the parameters has run",
          "[explain][reasons]") {
  const Growth growth{.kind = GrowthKind::retained_graph,
                      .bytes_per_step = 10_MiB,
                      .grown_bytes = 100_MiB,
                      .held = {.op = "aten::mul", .source = "fit.py:7"},
                      .referrer = "list 'losses' in loss_of_all (fit.py:5)"};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4), parameter("0.weight", true)});
  const std::vector<Growth> growths{growth};
  auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->text.ends_with("; no backward for the parameters has run yet"));
  CHECK(reason->how.back().starts_with("loss.backward()"));
  device.state.blocks.push_back({.bytes = 1_MiB, .category = Category::gradient});
  reason = find_reason({.device = device, .growths = growths});
  CHECK(reason->text.ends_with("per step"));
}

TEST_CASE("a line of code for one of many items is a loop over them", "[explain][reasons]") {
  const auto free = [](const std::string& item) { return item + " = None"; };
  CHECK(for_each_item("self.cache", free) == "self.cache = None");
  CHECK(for_each_item("results[*].scores", free) == "for _each in results: _each.scores = None");
  CHECK(for_each_item("nets[*].layers[*].weight", free) ==
        "for _each in (x for a in nets for x in a.layers): _each.weight = None");
  CHECK(for_each_item("styles[*][*][*]", free) ==
        "for _each in (x for a in styles for b in a for x in b): _each = None");
  CHECK(line_for_kept("attribute 'hypotheses[*].scores' in main (a.py:3)", false) ==
        "for _each in hypotheses: _each.scores = _each.scores.detach().cpu()");
  CHECK(assign_each("seen[*]", [](const std::string& item) { return item + ".cpu()"; }) ==
        "seen[:] = [x.cpu() for x in seen]");
  CHECK(line_for_kept("list 'batches[*].losses' in main (a.py:3)", false)
            .ends_with("or del batches[:-1], where these objects have served"));
}

TEST_CASE("dense matrices of n × n, side by side, are what fills the memory", "[explain][reasons]") {
  LiveBlock matrix{.bytes = 100_MiB,
                   .requested_bytes = 100_MiB,
                   .category = Category::output,
                   .made = {.op = "aten::div", .source = "mesh.py:9"},
                   .shape = "[5120, 5120] float32"};
  DeviceHistory device = at_oom({matrix});
  device.failure->requested_bytes = 100_MiB;
  device.failure->where = {.op = "aten::sub", .source = "mesh.py:12"};
  device.referrers = {{.variable = "variable 'L' in laplacian (mesh.py:5)",
                       .made = matrix.made,
                       .bytes = 100_MiB,
                       .storage_bytes = 100_MiB}};
  device.attribution.backward_bytes = 0;
  const ReasonFacts facts{.device = device, .growths = {}};
  const auto reason = find_square_matrices(facts);
  REQUIRE(reason);
  CHECK(reason->text ==
        "2 dense matrices of 5120 × 5120 at once at mesh.py:12: 200.00 MiB, one of them variable 'L' in laplacian "
        "(mesh.py:5)");
  device.state.blocks[0].shape = "[5120, 5000] float32";
  CHECK_FALSE(find_square_matrices(facts));
  device.state.blocks[0].shape = "[5120, 5120] float32";
  device.state.blocks[0].made.op = "aten::linear";  // as many features as examples
  CHECK_FALSE(find_square_matrices(facts));
}

TEST_CASE("a gradient for each sample is as large as the batch times the weight", "[explain][reasons]") {
  LiveBlock weight = parameter("fc1.weight", true);
  weight.shape = "[512, 512] float32";
  weight.requested_bytes = weight.bytes = 1_MiB;
  LiveBlock images = kept_activation(10_MiB, 5);
  images.shape = "[900, 16, 28, 28] float32";
  DeviceHistory device = at_oom({weight, images});
  device.failure->phase = Phase::backward;
  device.failure->requested_bytes = 900_MiB;
  device.failure->where = {.node = "BackwardHookFunctionBackward", .op = "aten::mul", .source = "dp.py:7"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "gradients of each sample at dp.py:7: 900 of fc1.weight [512, 512] float32, 900.00 MiB at once");
  device.failure->requested_bytes = 800_MiB;  // of no batch that is there
  CHECK(reason_of(device) != "gradients_of_samples");
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

TEST_CASE("results of layers that get larger are those of data that do", "[explain][reasons]") {
  const Growth layers{.kind = GrowthKind::growing_buffer,
                      .bytes_per_step = 2_MiB,
                      .grown_bytes = 60_MiB,
                      .held = {.op = "aten::mul", .module = "net", .source = "model.py:8"},
                      .referrer = "variable 'x' in forward (model.py:5)"};
  const Growth data{.kind = GrowthKind::growing_buffer,
                    .bytes_per_step = 1_MiB,
                    .grown_bytes = 30_MiB,
                    .held = {.op = "aten::to", .source = "train.py:3"},
                    .referrer = "variable 'val_in' in train (train.py:9)"};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const std::vector<Growth> growths{layers, data};
  const auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->text ==
        "layers work on more with each step, as variable 'val_in' in train (train.py:9) gets larger at train.py:3: "
        "3.00 MiB more per step in all (model.py:8)");
  CHECK(reason->how[0].starts_with("val_in = val_in[:limit]"));
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

TEST_CASE("what a container or a generator keeps has a line of its own", "[explain][reasons]") {
  CHECK(line_for_kept("OrderedDict 'self.masks' in main (a.py:3)", false)
            .starts_with("len(self.masks) > 16 and self.masks.popitem(last=False)"));
  CHECK(line_for_kept("generator 'futures[*]._result' in main (a.py:3)", false)
            .starts_with("del x  # before each yield"));
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

TEST_CASE("detached losses in a list keep no graph", "[explain][growth]") {
  const Where loss{.op = "aten::div", .source = "train.py:30"};
  const auto growing = [&](int64_t nodes) {
    std::vector<Growth> growths{{.kind = GrowthKind::retained_graph,
                                 .bytes_per_step = 10_MiB,
                                 .grown_bytes = 40_MiB,
                                 .first_step = 1,
                                 .last_step = 5,
                                 .held = loss,
                                 .places = {{.where = loss, .bytes_per_step = 10_MiB, .blocks = 4}},
                                 .place_count = 1}};
    const Referrer referrer{.variable = "list 'losses' in fit (train.py:20)", .made = loss, .nodes = nodes, .bytes = 4};
    find_referrers({referrer, referrer, referrer, referrer}, growths);
    return growths.front().referrer;
  };
  CHECK(growing(0).empty());
  CHECK(growing(9) == "list 'losses' in fit (train.py:20)");
}

TEST_CASE("what several nodes of a backward pass made is of one context", "[explain][growth]") {
  std::vector<Growth> growths{
      {.kind = GrowthKind::kept_tensors,
       .grown_bytes = 40_MiB,
       .places = {{.where = {.op = "aten::conv2d", .module = "stem"}, .context = 7, .blocks = 2}}}};
  const Where other{.op = "aten::conv2d", .module = "stages.0.f"};
  CHECK_FALSE(growths.front().has(other, 0));
  CHECK_FALSE(growths.front().has(other, 8));
  CHECK(growths.front().has(other, 7));
  const Referrer referrer{
      .variable = "list 'kept' in f (a.py:1)", .made = other, .storage_bytes = 20_MiB, .context = 7};
  find_referrers({referrer, referrer}, growths);
  CHECK(growths.front().referrer == "list 'kept' in f (a.py:1)");
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

TEST_CASE("a matrix of distances that lives is all pairs, whatever is made of it", "[explain][reasons]") {
  const LiveBlock matrix{.bytes = 100_MiB,
                         .requested_bytes = 100_MiB,
                         .category = Category::output,
                         .made = {.op = "aten::cdist", .source = "knn.py:8"}};
  const LiveBlock features{
      .bytes = 80_MiB, .requested_bytes = 80_MiB, .category = Category::output, .made = {.op = "aten::cat"}};
  DeviceHistory device = at_oom({matrix, features});
  device.failure->where = {.op = "aten::add", .source = "knn.py:9"};
  device.failure->requested_bytes = 100_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text == "all pairs at once at knn.py:8: a result of 100.00 MiB");
  device.state.blocks.front().made.op = "aten::mul";
  CHECK(reason_of(device) != "all_pairs");
}

TEST_CASE("a small matrix of distances beside larger data is no reason", "[explain][reasons]") {
  const LiveBlock matrix{.bytes = 1_MiB,
                         .requested_bytes = 1_MiB,
                         .category = Category::output,
                         .made = {.op = "aten::cdist", .source = "knn.py:8"}};
  const LiveBlock features{
      .bytes = 400_MiB, .requested_bytes = 400_MiB, .category = Category::output, .made = {.op = "aten::cat"}};
  DeviceHistory device = at_oom({matrix, features});
  device.failure->where = {.op = "aten::add", .source = "knn.py:9"};
  device.failure->requested_bytes = 1_MiB;
  CHECK(reason_of(device) != "all_pairs");
}

TEST_CASE("distances of all points of a batch are pairs, and no scores of attention", "[explain][reasons]") {
  constexpr int64_t kBytes = int64_t{2} * 6000 * 6000 * 4;
  const LiveBlock inner{.bytes = kBytes,
                        .requested_bytes = kBytes,
                        .category = Category::output,
                        .made = {.op = "aten::mul", .module = "PointNetwork", .source = "knn.py:5"},
                        .shape = "[2, 6000, 6000] float32"};
  const LiveBlock features{.bytes = 200_MiB,
                           .requested_bytes = 200_MiB,
                           .category = Category::activation,
                           .made = {.op = "aten::conv2d", .module = "layers.0", .source = "knn.py:12"}};
  DeviceHistory device = at_oom({inner, features});
  device.failure->where = {.op = "aten::sub", .module = "PointNetwork", .source = "knn.py:7"};
  device.failure->requested_bytes = kBytes;
  device.step_allocations.step = 1;
  device.step_allocations.blocks = {
      {.bytes = kBytes, .requested_bytes = kBytes, .born = 1, .made = {.op = "aten::matmul"}}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(
      reason->text ==
      "all pairs at once at knn.py:5: 2 tensors as [2, 6000, 6000] float32, for each pair of rows, 549.32 MiB in all");
  device.failure->where.op = "aten::softmax";
  CHECK(reason_of(device) == "attention_scores");
}

TEST_CASE("a model in evaluation mode that nobody trains has too large a batch, with a graph or without",
          "[explain][reasons]") {
  const LiveBlock result{
      .bytes = 60_MiB, .category = Category::output, .made = {.op = "aten::linear", .module = "net.head"}};
  DeviceHistory device = at_oom({result});
  device.attribution.backward_bytes = 0;
  device.failure->where = {.op = "aten::lstm", .module = "net.lstm", .source = "a.py:4"};
  device.step_allocations.blocks = {graph_block("net.head", 1_MiB)};
  CHECK(reason_of(device) != "batch_without_gradients");
  device.failure->modules_evaluate = true;
  CHECK(reason_of(device) == "batch_without_gradients");
  device.state.blocks.front().shape = "[1, 24, 1536000] float32";
  CHECK(find_reason({.device = device, .growths = {}})
            ->text.starts_with("the whole length of one sample, [1, 24, 1536000],"));
}

TEST_CASE("tensors of each atom with each other one are all pairs, images and scores are not", "[explain][reasons]") {
  const auto with = [](std::string_view shape) {
    LiveBlock first{.bytes = 50_MiB, .category = Category::input, .step = 5, .shape = shape}, second = first;
    second.bytes = 40_MiB;
    return at_oom({first, second});
  };
  CHECK(find_reason({.device = with("[648, 647, 32] float32"), .growths = {}})->text ==
        "all pairs at once: 2 tensors as [648, 647, 32] float32, for each pair of rows, 90.00 MiB in all");
  CHECK(reason_of(with("[2, 300, 300, 16] float32")) == "all_pairs");
  CHECK(reason_of(with("[8, 16, 300, 300] float32")) != "all_pairs");
  CHECK(reason_of(with("[100, 100, 500] float32")) != "all_pairs");
}

TEST_CASE("results of each layer that stay without a graph are named with what keeps them", "[explain][reasons]") {
  std::vector<LiveBlock> results;
  for (const std::string_view module : {"layers.0", "layers.1", "layers.2", "layers.3"}) {
    results.push_back({.bytes = 20_MiB,
                       .category = Category::output,
                       .phase = Phase::forward,
                       .step = 5,
                       .made = {.op = "aten::add", .module = module, .source = "net.py:7"},
                       .shape = "[16, 512, 384] float32"});
  }
  DeviceHistory device = at_oom(results);
  device.failure->where = {.op = "aten::mul", .module = "layers.4", .source = "net.py:6"};
  device.failure->no_grad = true;
  device.referrers = {{.variable = "tuple 'hidden_states' in forward (net.py:20)", .made = results.front().made}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "results_of_each_layer");
  CHECK(reason->text ==
        "a result of each of 4 layers is kept: 80.00 MiB of 'layers.*' at net.py:7, [16, 512, 384] float32");
  device.failure->where.module = "head";
  CHECK(reason_of(device) != "results_of_each_layer");
  device.failure->where.module = "layers.4";
  device.failure->no_grad = false;  // a graph may need them
  CHECK(reason_of(device) != "results_of_each_layer");
}

TEST_CASE("a cache that is joined anew is there twice", "[explain][reasons]") {
  std::vector<LiveBlock> blocks;
  for (const uint32_t step : {4U, 5U}) {
    for (int layer = 0; layer < 4; ++layer) {
      blocks.push_back({.bytes = 16_MiB,
                        .category = Category::output,
                        .phase = Phase::forward,
                        .step = step,
                        .made = {.op = "aten::cat", .module = "h.1", .source = "cache.py:9"}});
    }
  }
  DeviceHistory device = at_oom(blocks);
  device.failure->where = {.op = "aten::cat", .module = "h.5", .source = "cache.py:9"};
  device.failure->no_grad = true;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "copied_cache");
  CHECK(reason->text ==
        "aten::cat at cache.py:9 makes a cache anew while that of the step before is still there: 64.00 MiB of it, and "
        "64.00 MiB of the new one so far");
  device.failure->where.source = "cache.py:10";
  CHECK(reason_of(device) != "copied_cache");
}

TEST_CASE("a loop in a graph of a program without an optimizer learns nothing", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 100_MiB, .category = Category::output}});
  device.attribution.backward_bytes = 0;
  device.failure->where = {.op = "aten::linear", .source = "wave.py:9"};
  const StepAllocation result = graph_block("", 4_MiB);
  device.step_allocations = {.step = 5, .blocks = std::vector<StepAllocation>(16, result)};
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
  device.step_allocations.blocks.pop_back();
  CHECK(reason_of(device).empty());
  device.step_allocations.blocks.resize(16, result);
  device.failure->no_grad = true;
  CHECK(reason_of(device).empty());
}

TEST_CASE("square tensors in attention are its length, elsewhere matrices", "[explain][reasons]") {
  const LiveBlock mask{
      .bytes = 60_MiB, .requested_bytes = 60_MiB, .category = Category::input, .shape = "[3604, 3604] float32"};
  DeviceHistory device = at_oom({mask});
  device.failure->where = {.op = "aten::contiguous", .module = "encoder.0.SelfAttention", .source = "t.py:4"};
  device.failure->requested_bytes = 60_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "long_attention");
  CHECK(reason->text ==
        "attention over a length of 3604: 2 tensors of length × length, as scores, masks or biases of positions at "
        "t.py:4: 120.00 MiB");
  device.failure->where.module = "graph";
  CHECK(reason_of(device) == "square_matrices");
}

TEST_CASE("lines for what is kept are those of its holder: a hook, a metric, a cache of training",
          "[explain][reasons]") {
  CHECK(line_for_kept("attribute 'model.layer4._forward_hooks[*][*].out' in f (a.py:1)", false)
            .starts_with("handle = module.register_forward_hook(hook)"));
  CHECK(lines_for_kept("list 'metric.preds' in fit (a.py:1)", false) ==
        std::vector<std::string>{
            "metric.preds.append(x.detach().cpu())  # of a scalar: x.item(); where it is read again: .to(device)",
            "metric.preds.clear()  # once they have been read: an object that collects, as a metric: metric.reset()"});
  CHECK(lines_for_kept("list 'history' in train.py", false).size() == 1);
}

TEST_CASE("a forward pass without gradients in a step of training has its own batch", "[explain][reasons]") {
  const LiveBlock result{
      .bytes = 60_MiB, .category = Category::output, .made = {.op = "aten::linear", .module = "members.1"}};
  DeviceHistory device = at_oom({result});
  device.failure->where = {.op = "aten::add", .module = "members.1", .source = "a.py:4"};
  device.step_allocations.blocks = {graph_block("policy", 1_MiB)};
  CHECK(reason_of(device) != "batch_without_gradients");
  device.failure->no_grad = true;
  CHECK(reason_of(device) == "batch_without_gradients");
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

TEST_CASE("a sum of booleans makes numbers of 64 bits first", "[explain][reasons]") {
  const LiveBlock mask{
      .bytes = 64_MiB, .requested_bytes = 64_MiB, .category = Category::input, .shape = "[1, 1, 8192, 8192] bool"};
  DeviceHistory device = at_oom({mask});
  device.failure->where = {.op = "aten::sum", .inner = "aten::empty_strided", .module = "layers.0", .source = "m.py:4"};
  device.failure->requested_bytes = 512_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "large_cast");
  CHECK(reason->how.front().starts_with("mask.all(-1)"));
  device.failure->where.inner = "aten::sum";
  CHECK(reason_of(device) != "large_cast");
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

TEST_CASE("the variable of the host that is copied to the GPU is named if one tensor alone has that size",
          "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 10_MiB, .category = Category::parameter}});
  device.failure->phase = Phase::setup;
  device.failure->where = {.op = "aten::to", .source = "train.py:9"};
  device.failure->requested_bytes = 400_MiB;
  device.host_tensors = {{.variable = "dict 'batch' in fit (train.py:3)", .bytes = 400_MiB}};
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "a tensor of 400.00 MiB is copied to the GPU as a whole at train.py:9, dict 'batch' in fit (train.py:3)");
  device.host_tensors.push_back({.variable = "variable 'x' in fit (train.py:3)", .bytes = 400_MiB});
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "a tensor of 400.00 MiB is copied to the GPU as a whole at train.py:9");
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

TEST_CASE("scores of attention are recognized by names where no shape is known", "[explain][reasons]") {
  const Where product{.op = "aten::matmul", .module = "blocks.3.attn", .source = "chat.py:9"};
  const LiveBlock scores{.bytes = 400_MiB, .requested_bytes = 400_MiB, .category = Category::output, .made = product};
  const LiveBlock query{.bytes = 2_MiB, .requested_bytes = 2_MiB, .category = Category::output, .made = product};
  DeviceHistory device = at_oom({scores, query});
  device.failure->requested_bytes = 400_MiB;
  device.failure->where = product;
  device.failure->where.op = "aten::mul";
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "attention_scores");
  CHECK(reason->text == "attention without a fused kernel: scores of length × length at chat.py:9, 800.00 MiB in all");
  CHECK(reason->how.front().starts_with("y = F.scaled_dot_product_attention"));
  device.failure->where.inner_source = "transformers/models/qwen/modeling_qwen.py:242";
  CHECK(find_reason({.device = device, .growths = {}})->how.front() ==
        "AutoModel.from_pretrained(…, attn_implementation=\"sdpa\")");
  device.failure->where.module = device.state.blocks[0].made.module = "blocks.3.mlp";
  CHECK(reason_of(device) != "attention_scores");
}

TEST_CASE("square matrices of an optimizer are its own, and no SVD's full matrices", "[explain][reasons]") {
  LiveBlock weight = parameter("words.weight", true);
  weight.bytes = 4_MiB;
  const LiveBlock square{.bytes = 256_MiB,
                         .requested_bytes = int64_t{8192} * 8192 * 4,
                         .category = Category::optimizer_state,
                         .made = {.op = "aten::empty", .source = "train.py:11"},
                         .shape = "[8192, 8192] float32"};
  DeviceHistory device = at_oom({weight, square});
  device.failure->phase = Phase::optimizer;
  device.failure->requested_bytes = square.requested_bytes;
  device.failure->where = {.op = "aten::linalg_svd", .source = "train.py:11"};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "preconditioners");
  CHECK(reason->text ==
        "the optimizer keeps square matrices, of a weight with 8192 rows one of 8192 × 8192 at train.py:11: 256.00 MiB "
        "of state for 4.00 MiB of parameters");
  device.state.blocks[1].category = Category::output;
  CHECK(reason_of(device) != "full_matrices");  // what is decomposed is as large
}

TEST_CASE("what a container has of tensors made in advance are no results", "[explain][reasons]") {
  std::vector<LiveBlock> blocks(10, {.bytes = 30_MiB,
                                     .requested_bytes = 30_MiB,
                                     .category = Category::input,
                                     .made = {.op = "aten::zeros", .source = "serve.py:32"}});
  DeviceHistory device = at_oom(blocks);
  device.failure->requested_bytes = 6_MiB;
  device.failure->where = {.op = "aten::einsum", .module = "Layer", .source = "serve.py:18"};
  device.referrers = {{.variable = "list 'engine.cache' in serve.py",
                       .made = {.op = "aten::zeros", .source = "serve.py:32"},
                       .storage_bytes = 30_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "list 'engine.cache' in serve.py has 10 tensors that were made in advance at serve.py:32, to be filled: 300.00 "
        "MiB");
  CHECK(reason->fix == "smaller_cache");
  for (LiveBlock& block : device.state.blocks) block.step = 4;
  CHECK(find_reason({.device = device, .growths = {}})->fix == "results_to_host");
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

TEST_CASE("where memory grows by a key each time the line removes keys, and an optimizer's state its parameters",
          "[explain][reasons]") {
  const auto line = [](std::string_view referrer) { return lines_for_kept(referrer, false).front(); };
  CHECK(line("attribute 'sessions[\"*\"].layers[*].keys' in serve.py").starts_with("sessions.pop(key)  # "));
  CHECK(line("defaultdict 'scene.optimizer.state' in splat.py").starts_with("del scene.optimizer.state[old]  # "));
}

TEST_CASE("gradients that grow are kept by parameters, not by a reference cycle", "[explain][reasons]") {
  const Growth growth{.kind = GrowthKind::kept_tensors,
                      .bytes_per_step = 32_MiB,
                      .grown_bytes = 96_MiB,
                      .held = {.op = "aten::pow", .source = "fit.py:44"}};
  LiveBlock gradient = kept_activation(64_MiB, 4);
  gradient.made = growth.held;
  gradient.category = Category::gradient;
  DeviceHistory device = at_oom({gradient, gradient});
  device.looked_for_referrers = true;
  const std::vector<Growth> growths{growth};
  const auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->id == "gradients_kept");
  CHECK(
      reason->text ==
      "gradients of more and more parameters stay: 2 of 64.00 MiB each by now, made at fit.py:44, 32.00 MiB per step");
  CHECK(reason->kept_by == "parameters, as their .grad: 2 gradients, 128.00 MiB");
  for (LiveBlock& block : device.state.blocks) block.category = Category::output;
  CHECK(reason_of(device, growths) == "reference_cycle");
}

TEST_CASE("data that require gradients and their .grad keep one another", "[explain][reasons]") {
  const Growth gradients{.kind = GrowthKind::kept_tensors,
                         .bytes_per_step = 8_MiB,
                         .grown_bytes = 80_MiB,
                         .held = {.op = "aten::new_empty_strided"}};
  Growth leaves{.kind = GrowthKind::kept_tensors,
                .bytes_per_step = 8_MiB,
                .grown_bytes = 80_MiB,
                .held = {.op = "aten::to", .source = "pinn.py:30"},
                .places = {{.where = {.op = "aten::to", .source = "pinn.py:30"}, .bytes_per_step = 8_MiB}}};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const std::vector<Growth> growths{gradients, leaves};
  const auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->id == "create_graph");
  CHECK(reason->text ==
        "backward(create_graph=True): data that require gradients, made at pinn.py:30, and their .grad keep one "
        "another and "
        "the graph between them, 16.00 MiB per step in all");
  CHECK(reason->how.size() == 2);
  leaves.bytes_per_step = 1_MiB;  // of something else
  leaves.places.front().bytes_per_step = 1_MiB;
  CHECK(reason_of(device, {gradients, leaves}) != "create_graph");
}

TEST_CASE("data many times as large as in the step before stand before what the step makes of them",
          "[explain][reasons]") {
  const auto scores = [](std::string_view module, int64_t bytes) {
    return StepAllocation{.bytes = bytes,
                          .requested_bytes = bytes,
                          .born = 2,
                          .category = Category::activation,
                          .phase = Phase::forward,
                          .made = {.op = "aten::softmax", .module = module}};
  };
  const auto data = [](std::string_view shape, int64_t bytes) {
    return StepAllocation{.bytes = bytes,
                          .requested_bytes = bytes,
                          .born = 1,
                          .category = Category::input,
                          .phase = Phase::forward,
                          .made = {.op = "aten::to", .source = "asr.py:97"},
                          .shape = shape};
  };
  const LiveBlock score{.bytes = 64_MiB,
                        .requested_bytes = 64_MiB,
                        .category = Category::activation,
                        .phase = Phase::forward,
                        .step = 5,
                        .made = {.op = "aten::softmax", .module = "attn", .source = "asr.py:57"},
                        .shape = "[8, 4, 724, 724] float32"};
  DeviceHistory device = at_oom({score, score});
  device.failure->where = {.op = "aten::softmax", .module = "attn", .source = "asr.py:57"};
  device.complete = {.step = 4,
                     .blocks = {data("[8, 300, 80] float32", 2_MiB), scores("0.attn", 2_MiB), scores("1.attn", 2_MiB)}};
  device.step_allocations = {
      .step = 5, .blocks = {data("[8, 1800, 80] float32", 12_MiB), scores("0.attn", 64_MiB), scores("1.attn", 64_MiB)}};
  device.step_allocations.blocks.back().made.op = "aten::matmul";
  device.complete.blocks.back().made.op = "aten::matmul";
  const ReasonFacts facts{.device = device, .growths = {}};
  const auto first = find_reason(facts);
  REQUIRE(first);
  CHECK(first->id == "larger_step");
  CHECK(first->text.find(
            "the data are [8, 1800, 80] float32 at asr.py:97, after [8, 300, 80] float32 in the step before, and "
            "results of its layers are 32 times as large") != std::string::npos);
  const auto second = find_second_reason(facts, *first);
  REQUIRE(second);
  CHECK(second->id == "attention_scores");
  device.complete.blocks.front().shape = {};  // nothing had saved them
  CHECK(find_reason(facts)->text.find("[8, 1800, 80] float32 at asr.py:97, 6.0 times as large as in the step before") !=
        std::string::npos);
  device.complete.blocks.front() = data("[8, 1800, 80] float32", 12_MiB);
  CHECK(reason_of(device) == "attention_scores");
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
