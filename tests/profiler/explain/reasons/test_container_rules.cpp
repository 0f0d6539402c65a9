#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of container_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

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
  const auto of_loop =
      find_reason({.device = device, .growths = {}});  // of a comprehension: no variable leads to its list yet
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

TEST_CASE(
    "of a list that an evaluation fills batch after batch no smaller batch leaves less, and a hook is to be removed",
    "[explain][reasons]") {
  const LiveBlock result{.bytes = 20_MiB,
                         .requested_bytes = 20_MiB,
                         .category = Category::output,
                         .step = 5,
                         .made = {.op = "aten::mul", .source = "net.py:4"}};
  DeviceHistory device = at_oom(std::vector<LiveBlock>(12, result));
  device.referrers.assign(
      12, {.variable = "list 'outputs' in predict (eval.py:7)", .made = result.made, .storage_bytes = 20_MiB});
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK_FALSE(reason->of_any_batch);  // tokens of one batch, say
  const StepAllocation batch{
      .bytes = 1_MiB, .born = 1, .phase = Phase::forward, .made = {.op = "aten::to", .source = "eval.py:9"}};
  device.step_allocations = {.step = 5, .blocks = std::vector<StepAllocation>(12, batch)};
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->of_any_batch);
  for (Referrer& one : device.referrers)
    one.variable = "list 'net.layer._forward_hooks[0][0].seen' in predict (eval.py:7)";
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("a hook of a module fills list 'net.layer._forward_hooks[*][*].seen'"));
  CHECK(reason->how.front().find("handle.remove()") != std::string::npos);
}

TEST_CASE("rows that jacobian() collects are named by what they are", "[explain][reasons]") {
  const Where made{.op = "aten::matmul", .source = "f.py:4"};
  const Growth growth{.bytes_per_step = 1_MiB,
                      .grown_bytes = 200_MiB,
                      .first_step = 1,
                      .last_step = 201,
                      .held = made,
                      .places = {{.where = made, .bytes_per_step = 1_MiB}},
                      .place_count = 1,
                      .referrer = "list 'jac_i_el' in jacobian (torch/autograd/functional.py:587)"};
  const auto reason = find_reason({.device = at_oom({{.bytes = 200_MiB}}), .growths = {growth}});
  REQUIRE(reason);
  CHECK(reason->id == "whole_jacobian");
  CHECK(reason->text ==
        "jacobian() computes the derivative of each output, and keeps all of them: 1.00 MiB for one, as large as what "
        "it is "
        "with respect to, 200.00 MiB so far at f.py:4");
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
  for (uint64_t born = 1; born <= 3; ++born) {
    device.referrers.push_back({.variable = "list 'outputs' in predict (eval.py:1)",
                                .made = {.op = "aten::mul", .source = "eval.py:4"},
                                .storage_bytes = 50_MiB,
                                .born = born});
    device.referrers.push_back({.variable = "attribute 'pages[1].mask' in predict (eval.py:1)",
                                .made = {.op = "aten::mul", .source = "eval.py:5"},
                                .storage_bytes = 80_MiB,
                                .born = born + 3});
  }
  device.failure->where = {.op = "aten::cat", .source = "eval.py:9"};
  device.failure->requested_bytes = 150_MiB;
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "joined_results");
  CHECK(reason->text.find("joins the 3 tensors of list 'outputs'") != std::string::npos);

  device.failure->requested_bytes = 240_MiB;
  for (Referrer& one : device.referrers) one.storage_bytes = one.variable.starts_with("list") ? 5_MiB : 80_MiB;
  const auto of_objects = find_reason({.device = device, .growths = {}});
  REQUIRE(of_objects);
  CHECK(of_objects->id == "joined_results");
  CHECK(of_objects->how.front().starts_with("for _each in pages: _each.mask = _each.mask.cpu()"));
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

}  // namespace oomdiag
