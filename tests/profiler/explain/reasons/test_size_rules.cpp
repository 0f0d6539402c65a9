#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of size_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

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
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "the whole batch goes through the model at once, without gradients: 600.00 MiB at layer '1' (test.py:3)");
  CHECK(reason->how.front() == "y = torch.cat([model(part) for part in x.split(16)])  # in test.py:3");
  device.state.blocks.push_back({.bytes = 1_MiB, .category = Category::input, .shape = "[1, 3, 300, 300] float32"});
  device.failure->where.op = "aten::conv2d";
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.starts_with("the whole image goes through the model at once"));
  CHECK(reason->fix == "smaller_images");  // there is nothing to split
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

TEST_CASE("a batch of sequences most of which is padding is named, and how long they are", "[explain][reasons]") {
  LiveBlock kept = kept_activation(100_MiB, 5);
  kept.shape = "[4, 1024, 3072] float32";
  DeviceHistory device = at_oom({kept, kept, parameter("0.weight", true)});
  device.padded = {
      {.variable = "variable 'ids' in main (gpt2.py:66)", .shape = "[4, 1024] int64", .longest = 75, .per_mille = 62}};
  auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "padding");
  CHECK(reason->text ==
        "94 % of variable 'ids' in main (gpt2.py:66), [4, 1024] int64, is padding: the longest of its sequences has 75 "
        "of 1024 positions, and layers compute all of it, 200.00 MiB so far");
  CHECK(reason->how.back().find("max_length=128)") != std::string::npos);
  device.padded.front().longest = 1024;
  reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->how.front() == "ids = ids[..., :256]  # the longest cut, or left out as the data are loaded");
  for (LiveBlock& block : device.state.blocks) block.shape = "[4096, 3072] float32";  // 4 × 1024 rows
  CHECK(reason_of(device) == "padding");
  for (LiveBlock& block : device.state.blocks) block.shape = "[64, 64] float32";  // of no such length
  CHECK(reason_of(device) != "padding");
}

TEST_CASE("of one volume a patch is named that has half of each side", "[explain][reasons]") {
  LiveBlock kept = kept_activation(100_MiB, 5);
  kept.made.op = "aten::conv3d";
  kept.shape = "[1, 16, 384, 384, 64] float32";
  DeviceHistory device = at_oom({kept, kept, parameter("0.weight", true)});
  device.state.step = 5;
  device.step_allocations = {.step = 5, .blocks = {graph_block("0.act", 100_MiB)}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "many_rows");
  CHECK(reason->fix == "smaller_images");
  CHECK(reason->how.front().starts_with("# patches or crops of 192 × 192 × 64 in place of 384 × 384 × 64"));
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
