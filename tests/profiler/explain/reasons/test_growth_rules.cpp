#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of growth_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("who keeps the graph of each step is said by name, and so is what hands it on", "[explain][reasons]") {
  const std::string variable = "variable 'energies' in run_dynamics (simulate_all_systems.py:463)";
  const Growth growth{
      .kind = GrowthKind::retained_graph, .bytes_per_step = 10_MiB, .grown_bytes = 90_MiB, .referrer = variable};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const std::vector<Growth> growths{growth};
  auto reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->text == variable + " keeps the graph of each step, 10.00 MiB per step");
  CHECK(reason->how == std::vector<std::string>{"energies += added.item()  # of a tensor: added.detach()"});

  device.referrers = {
      {.variable = "attribute 'model.state' in run_dynamics (simulate_all_systems.py:463)", .nodes = 1}};
  reason = find_reason({.device = device, .growths = growths});
  REQUIRE(reason);
  CHECK(reason->text ==
        variable + " keeps the graph of each step, 10.00 MiB per step; model.state hands it to the next");
  CHECK(reason->how == std::vector<std::string>{"model.state = model.state.detach()  # before the next step uses it"});
}

TEST_CASE("all sums that keep graphs are named, each with its line", "[explain][reasons]") {
  const Growth growth{.kind = GrowthKind::retained_graph,
                      .bytes_per_step = 10_MiB,
                      .grown_bytes = 90_MiB,
                      .referrer = "variable 'total' in fit (fit.py:5)"};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  device.referrers = {{.variable = "variable 'total' in fit (fit.py:5)", .nodes = 900, .bytes = 4},
                      {.variable = "variable 'errors' in fit (fit.py:5)", .nodes = 9, .bytes = 4},
                      {.variable = "variable 'loss' in fit (fit.py:5)", .nodes = 2, .bytes = 4},
                      {.variable = "variable 'sums' in test (fit.py:25)", .nodes = 9, .bytes = 4}};
  const auto reason = find_reason({.device = device, .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "variables 'total', 'errors' in fit (fit.py:5) keep the graph of each step, 10.00 MiB per step");
  CHECK(reason->how.back().starts_with("errors += added.item()"));
}

TEST_CASE("all lists that keep the same graphs are named: one that lets go frees nothing", "[explain][reasons]") {
  const Growth growth{.kind = GrowthKind::retained_graph,
                      .bytes_per_step = 30_MiB,
                      .grown_bytes = 90_MiB,
                      .referrer = "list 'losses' in fit (fit.py:5)"};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  for (int step = 0; step < 3; ++step) {
    device.referrers.push_back({.variable = "list 'losses' in fit (fit.py:5)", .nodes = 40, .bytes = 4});
    device.referrers.push_back({.variable = "list 'penalties' in fit (fit.py:5)", .nodes = 1, .bytes = 4});
    device.referrers.push_back({.variable = "list 'scores' in fit (fit.py:5)", .nodes = 0, .bytes = 4});
  }
  const auto reason = find_reason({.device = device, .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "lists 'losses', 'penalties' in fit (fit.py:5) keep the graph of each step, 30.00 MiB per step");
  CHECK(reason->how.back().starts_with("penalties.append(x.detach())"));
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

TEST_CASE("equal tensors beside others of the same line are weights of a model, and no cycles", "[explain][reasons]") {
  const LiveBlock weight{.bytes = 100_MiB, .made = {.op = "aten::to", .source = "export.py:9"}};
  LiveBlock wider = weight;
  wider.bytes = 400_MiB;
  DeviceHistory device = at_oom({weight, weight, weight, weight, wider});
  device.state.step = 0;
  device.looked_for_referrers = true;
  CHECK(reason_of(device) != "reference_cycle");
  device.state.blocks.pop_back();
  CHECK(reason_of(device) == "reference_cycle");
}

TEST_CASE("a write in place that leaves its graph behind is named with its line", "[explain][reasons]") {
  const Growth growth{
      .kind = GrowthKind::retained_graph, .grown_bytes = 90_MiB, .held = {.op = "aten::conv2d", .source = "a.py:3"}};
  DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  device.looked_for_referrers = true;
  device.curves.places = {{.where = {.op = "aten::mul_", .source = "a.py:9"}, .in_graph = true, .blocks = {1, 2, 3}}};
  const auto reason = find_reason({.device = device, .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->id == "reference_cycle");
  CHECK(reason->text.ends_with("or a write in place, as aten::mul_ at a.py:9"));
  CHECK(reason->how.front().find("in place of the write at a.py:9") != std::string::npos);
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

TEST_CASE("what variables refer to themselves is kept by them, not by a graph", "[explain][reasons]") {
  Growth growth{.kind = GrowthKind::retained_graph, .grown_bytes = 90_MiB, .held = {.node = "MmBackward0"}};
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {growth}) == "create_graph");
  growth.referred_bytes = 80_MiB;
  CHECK(reason_of(device, {growth}) == "kept_tensors");
}

TEST_CASE("graphs of a few earlier steps that a list leads to are its", "[explain][reasons]") {
  DeviceHistory device = at_oom({kept_activation(100_MiB, 2), kept_activation(100_MiB, 3)});
  device.state.step = 5;
  device.referrers = {{.variable = "list 'history' in train.py", .nodes = 40}};
  CHECK(reason_of(device) == "graph_of_earlier_steps");
  device.state.blocks.back().step = 2;
  CHECK(reason_of(device).empty());
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

TEST_CASE("all lists that one loop fills are named where tensors of each step stay", "[explain][reasons]") {
  const Where logits{.op = "aten::add", .module = "net", .source = "epoch.py:47"},
      labels{.op = "aten::to", .source = "epoch.py:45"};
  const Growth growth{
      .bytes_per_step = 20_MiB,
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

TEST_CASE("a state that is handed on is named in the backward pass of the second step", "[explain][growth]") {
  DeviceHistory device = at_oom({kept_activation(100_MiB, 1), kept_activation(100_MiB, 2)});
  device.state.step = 2;
  device.failure->phase = Phase::backward;
  CHECK(reason_of(device) != "graph_of_earlier_steps");
  device.referrers = {{.variable = "attribute 'model.h0' in fit (train.py:9)", .nodes = 1, .bytes = 4096}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text == "model.h0 keeps the graph of earlier steps at net.py:9, 100.00 MiB: each step adds its own");
  CHECK(reason->how == std::vector<std::string>{"model.h0 = model.h0.detach()  # before the next step uses it"});
  device.failure->phase = Phase::forward;  // the step before is replaced at its end
  CHECK(reason_of(device) != "graph_of_earlier_steps");
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

}  // namespace oomdiag
