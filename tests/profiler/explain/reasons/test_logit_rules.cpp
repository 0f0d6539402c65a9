#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of logit_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

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

TEST_CASE("what convolutions and their norms make is no logits, though a table has as many rows",
          "[explain][reasons]") {
  const LiveBlock table{
      .bytes = 1_MiB, .category = Category::parameter, .name = "fc.weight", .shape = "[8192, 16] float32"};
  LiveBlock result{.bytes = 256_MiB,
                   .requested_bytes = 256_MiB,
                   .category = Category::output,
                   .made = {.op = "aten::linear", .module = "net.9"}};
  DeviceHistory device = at_oom({table, result});
  device.failure->where = {.op = "aten::linear", .module = "net.9"};
  CHECK(reason_of(device) == "logits");
  for (const std::string_view op : {"aten::conv_transpose3d", "aten::batch_norm"}) {
    device.state.blocks.back().made.op = op;
    device.failure->where.op = op;
    CHECK(reason_of(device) != "logits");
  }
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

}  // namespace oomdiag
