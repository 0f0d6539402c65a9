#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of pair_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

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

}  // namespace oomdiag
