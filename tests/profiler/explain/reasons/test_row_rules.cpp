#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of row_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

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

TEST_CASE("a tensor as large as all parameters is said to be so", "[explain][reasons]") {
  LiveBlock weight = parameter("0.weight", true);
  weight.bytes = 480_MiB;
  DeviceHistory device = at_oom({weight});
  device.failure->requested_bytes = 489_MiB;
  device.failure->where = {.op = "aten::empty", .source = "load.py:3"};
  CHECK(find_reason({.device = device, .growths = {}})->text ==
        "one tensor of 489.00 MiB, as much as all parameters take: aten::empty at load.py:3 makes it at once");
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

TEST_CASE("data that each of several lines has made anew are the same data several times", "[explain][reasons]") {
  const auto series = [](std::string_view line, int64_t bytes) {
    return LiveBlock{.bytes = bytes,
                     .requested_bytes = bytes,
                     .category = Category::output,
                     .phase = Phase::forward,
                     .step = 5,
                     .made = {.op = "aten::stack", .source = line}};
  };
  std::vector<LiveBlock> blocks(100, series("a.py:7", 2_MiB));  // a list of results
  blocks.push_back(series("a.py:3", 200_MiB));
  blocks.push_back(series("a.py:9", 201_MiB));
  const auto reason = find_data_several_times({.device = at_oom(blocks), .growths = {}});
  REQUIRE(reason);
  CHECK(reason->text.find("on the GPU 3 times") != std::string::npos);
  CHECK(reason->text.find("a.py:3") != std::string::npos);
  blocks.back().bytes = 90_MiB;
  CHECK_FALSE(find_data_several_times({.device = at_oom(blocks), .growths = {}}));
}

}  // namespace oomdiag
