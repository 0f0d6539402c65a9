#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of size_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

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
  CHECK(reason->how.back().starts_with("with torch.no_grad():"));
  device.complete.blocks = results(64_MiB);
  CHECK(reason_of(device).empty());
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

TEST_CASE("buffers that are most of all are named with the largest", "[explain][reasons]") {
  const LiveBlock buffer{
      .bytes = 300_MiB, .category = Category::buffer, .name = "receivers", .shape = "[202050, 450] float32"};
  CHECK(reason_of(at_oom({buffer, buffer})) == "large_buffers");
  CHECK(reason_of(at_oom({buffer, kept_activation(400_MiB, 4)})) != "large_buffers");
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

TEST_CASE("double precision is a reason where half of the bytes have it", "[explain][reasons]") {
  CHECK(reason_of(at_oom({{.bytes = 200_MiB, .shape = "[1024] float64"}})) == "float64");
  CHECK(reason_of(at_oom({{.bytes = 20_MiB, .shape = "[1024] float64"}})).empty());
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

}  // namespace oomdiag
