#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of data_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

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
  CHECK(
      reason->how.back().starts_with("# sequences or images of many sizes"));  // a step of training, as the one before
  device.padded = {
      {.variable = "variable 'x' in main (a.py:1)", .shape = "[8, 4096] float32", .longest = 4096, .per_mille = 300}};
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.ends_with("(a.py:3); 70 % of variable 'x' in main (a.py:1), [8, 4096] float32, is padding"));
  CHECK(reason->how.front() == "x = x[..., :1024]  # the longest cut, or left out as the data are loaded");
  device.complete.blocks = results(64_MiB);
  CHECK(reason_of(device).empty());
}

TEST_CASE("of a longer sequence the longest are to be cut, and a large result is to be used in parts",
          "[explain][reasons]") {
  const auto results = [](int64_t bytes, std::string_view shape) {
    const StepAllocation data{.bytes = bytes,
                              .requested_bytes = bytes,
                              .born = 1,
                              .category = Category::input,
                              .phase = Phase::forward,
                              .made = {.op = "aten::to", .source = "a.py:2"},
                              .shape = shape};
    StepAllocation result = data;
    result.category = Category::output;
    std::vector<StepAllocation> blocks{data};
    for (const std::string_view module : {"net.0", "net.1", "net.2"}) {
      result.made = {.op = "aten::linear", .module = module, .source = "a.py:3"};
      blocks.push_back(result);
    }
    return blocks;
  };
  LiveBlock scores{.bytes = 200_MiB,
                   .requested_bytes = 200_MiB,
                   .category = Category::output,
                   .phase = Phase::forward,
                   .step = 5,
                   .made = {.op = "aten::linear", .module = "net.0", .source = "a.py:3"}};
  DeviceHistory device = at_oom({scores});
  device.complete = {.step = 4, .blocks = results(8_MiB, "[8, 1, 100, 80] float32")};
  device.step_allocations = {.step = 5, .blocks = results(64_MiB, "[8, 1, 800, 80] float32")};
  device.attribution.backward_bytes = 0;
  device.failure->where = scores.made;
  device.referrers = {
      {.variable = "variable 'scores' in rank (a.py:1)", .made = scores.made, .storage_bytes = 200_MiB}};
  const auto reason = find_larger_step({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->how[0].starts_with("x = x[:, :, :100]  # the longest ones cut"));
  CHECK(reason->how[1].starts_with("for part in x.split(size): use(model(part))  # what is computed of scores"));
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

TEST_CASE("zeros that are as many as classes for each label are masks", "[explain][reasons]") {
  const LiveBlock labels{.bytes = 2_MiB, .requested_bytes = 2_MiB, .category = Category::input};
  DeviceHistory device = at_oom({labels});
  device.failure->requested_bytes = 120_MiB;
  device.failure->where = {.op = "aten::zeros", .source = "loss.py:3"};
  CHECK(reason_of(device) == "one_hot");
  device.state.blocks.front().shape = "[2, 1, 64, 64, 64] float32";
  CHECK(reason_of(device) == "large_result");
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

TEST_CASE("a mask of booleans becomes indices, one for each dimension", "[explain][reasons]") {
  DeviceHistory device = at_oom({{.bytes = 10_MiB, .requested_bytes = 10_MiB, .category = Category::output}});
  device.failure->where = {.op = "aten::index", .inner = "aten::resize_", .source = "test.py:63"};
  device.failure->requested_bytes = 160_MiB;
  CHECK(reason_of(device) == "mask_indices");
  device.failure->requested_bytes = 150_MiB;
  CHECK(reason_of(device) != "mask_indices");
}

TEST_CASE("buffers that are most of all are named with the largest", "[explain][reasons]") {
  const LiveBlock buffer{
      .bytes = 300_MiB, .category = Category::buffer, .name = "receivers", .shape = "[202050, 450] float32"};
  CHECK(reason_of(at_oom({buffer, buffer})) == "large_buffers");
  CHECK(reason_of(at_oom({buffer, kept_activation(400_MiB, 4)})) != "large_buffers");
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

}  // namespace oomdiag
