#include <fmt/format.h>

#include <memory>
#include <numeric>

#include "profiler/explain/batch.h"
#include "profiler/explain/facts/common_referrers.h"
#include "profiler/fold_indices.h"
#include "profiler/report/make/holders.h"
#include "profiler/report/make/make_report.h"
#include "profiler/report/text/holders_table.h"
#include "profiler/report/text/text.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

/// Blocks in use, whose names are kept with them.
class Blocks {
 public:
  Blocks& add(Category category, const std::string& module, int64_t bytes, const std::string& shape = "",
              const std::string& op = "aten::mul", const std::string& line = "") {
    LiveBlock& block = moment_.blocks.emplace_back();
    block.category = category;
    block.bytes = bytes;
    block.made = {.op = keep(op), .module = keep(module), .source = keep("train.py:22"), .inner_source = keep(line)};
    block.shape = keep(shape);
    moment_.allocated_bytes += bytes;
    return *this;
  }
  const MemoryState& state() const { return moment_; }

 private:
  std::string_view keep(const std::string& text) {
    return texts_.emplace_back(std::make_unique<std::string>(text))->c_str();
  }

  std::vector<std::unique_ptr<std::string>> texts_;
  MemoryState moment_;
};

int64_t sum(const std::vector<ReportHolder>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0},
                         [](int64_t bytes, const ReportHolder& row) { return bytes + row.bytes; });
}

std::string layer(int i, const std::string& part) { return "transformer.h." + std::to_string(i) + "." + part; }

}  // namespace

TEST_CASE("indices of layers are folded, names with digits are not", "[report]") {
  CHECK(fold_indices("transformer.h.11.mlp.act") == "transformer.h.*.mlp.act");
  CHECK(fold_indices("0.layer1.2") == "*.layer1.*");
  CHECK(fold_indices("") == "");
}

TEST_CASE("numbers in brackets are folded, other brackets are not", "[report]") {
  CHECK(fold_subscripts("attribute 'nets[3]._modules[10].seen' in f") == "attribute 'nets[*]._modules[*].seen' in f");
  CHECK(fold_subscripts("list 'd['a1'][x2]' in f [") == "list 'd['a1'][x2]' in f [");
}

TEST_CASE("a row is called by the variable of its tensors, with a star where they differ by an index", "[report]") {
  Blocks blocks;
  blocks.add(Category::output, "", 2_MiB, "", "aten::relu").add(Category::output, "", 2_MiB, "", "aten::tanh");
  std::vector<Referrer> referrers;
  for (const LiveBlock& block : blocks.state().blocks)
    referrers.push_back(
        {.variable = "attribute 'seen[3]' in f", .made = block.made, .storage_bytes = block.requested_bytes});
  CHECK(fold_holders(blocks.state(), CommonReferrers(referrers)).front().referrer == "attribute 'seen[3]' in f");
  Blocks alike;
  alike.add(Category::output, "1", 2_MiB).add(Category::output, "2", 2_MiB);
  referrers.clear();
  for (const LiveBlock& block : alike.state().blocks) {
    referrers.push_back({.variable = referrers.empty() ? "attribute 'seen[1]' in f" : "attribute 'seen[2]' in f",
                         .made = block.made,
                         .storage_bytes = block.requested_bytes});
  }
  CHECK(fold_holders(alike.state(), CommonReferrers(referrers)).front().referrer == "attribute 'seen[*]' in f");
  CHECK(fold_holders(alike.state(), CommonReferrers({})).front().referrer.empty());
}

TEST_CASE("a row is called by the variable that keeps nearly all of its tensors", "[report]") {
  Blocks layers;
  for (const char* const layer : {"1", "2", "3", "4", "5"}) layers.add(Category::output, layer, 2_MiB);
  std::vector<Referrer> referrers;
  for (const LiveBlock& block : layers.state().blocks) {
    if (referrers.size() < 4)
      referrers.push_back(
          {.variable = "tuple 'kept' in f", .made = block.made, .storage_bytes = block.requested_bytes});
  }
  CHECK(fold_holders(layers.state(), CommonReferrers(referrers)).front().referrer == "tuple 'kept' in f");
  referrers.pop_back();
  CHECK(fold_holders(layers.state(), CommonReferrers(referrers)).front().referrer.empty());
}

TEST_CASE("the same tensor of each layer is one row", "[report]") {
  Blocks blocks;
  for (int i = 0; i < 12; ++i) {
    blocks.add(Category::activation, layer(i, "mlp.act"), 3_MiB, "[8, 1024, 3072] float32");
    blocks.add(Category::activation, layer(i, "attn"), 1_MiB, "[8, 12, 1024, 64] float32");
  }
  const auto rows = fold_holders(blocks.state(), CommonReferrers({}));
  REQUIRE(rows.size() == 2);
  CHECK(rows[0] == ReportHolder{.category = Category::activation,
                                .name = "transformer.h.*.mlp.act",
                                .op = "aten::mul",
                                .source = "train.py:22",
                                .shape = "[8, 1024, 3072] float32",
                                .bytes = 36_MiB,
                                .blocks = 12,
                                .copies = 12,
                                .block_bytes = 3_MiB});
  CHECK(rows[1].bytes == 12_MiB);
}

TEST_CASE("where a layer has many parts they are folded until eight rows name four fifths", "[report]") {
  Blocks blocks;
  for (int stage = 1; stage <= 4; ++stage) {
    for (int i = 0; i < 9; ++i) {
      for (const char* part : {"conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "relu"}) {
        blocks.add(Category::activation, "layer" + std::to_string(stage) + "." + std::to_string(i) + "." + part, 1_MiB);
      }
    }
  }
  const auto rows = fold_holders(blocks.state(), CommonReferrers({}));
  CHECK(rows.size() <= kMaxHolders);
  CHECK(sum(rows) * 5 >= 4 * blocks.state().allocated_bytes);
  CHECK(rows[0].name == "layer*.*.bn*");
}

TEST_CASE("many small tensors are named by their op and layer", "[report]") {
  Blocks blocks;
  for (int i = 0; i < 22; ++i) {
    for (char head = 'a'; head < 'r'; ++head) {
      const std::string path = "model.layers." + std::to_string(i) + ".attn." + head + "_proj";
      blocks.add(Category::activation, path + ".lora_dropout.default", 6_MiB, "", "aten::dropout");
      blocks.add(Category::activation, path, 1_MiB, "", "aten::linear");
    }
  }
  const auto rows = fold_holders(blocks.state(), CommonReferrers({}));
  CHECK(sum(rows) * 5 >= 4 * blocks.state().allocated_bytes);
  CHECK(rows[0].op == "aten::dropout");
  CHECK(rows[0].name == "model.layers.*");
}

TEST_CASE("logits and losses are named as such", "[report]") {
  Blocks blocks;
  blocks.add(Category::activation, "", 64_MiB, "[8192, 32000] float32", "aten::cross_entropy_loss", "loss_utils.py:42")
      .add(Category::output, "lm_head", 32_MiB, "[8, 1024, 32000] bfloat16", "aten::linear")
      .add(Category::activation, "norm", 8_MiB, "[8, 1024, 4096] bfloat16");
  const auto rows = fold_holders(blocks.state(), CommonReferrers({}));
  REQUIRE(rows.size() == 3);
  CHECK((rows[0].kind == "loss" && rows[0].source == "loss_utils.py:42"));
  CHECK(rows[1].kind.empty());
  CHECK((rows[2].kind == "logits" && rows[2].name == "lm_head"));
}

TEST_CASE("what no module made is named by its op and line, also inside of a package", "[report]") {
  Blocks blocks;
  blocks.add(Category::unknown, "", 4_MiB, "", "aten::cat", "transformers/cache_utils.py:120");
  const auto rows = fold_holders(blocks.state(), CommonReferrers({}));
  REQUIRE(rows.size() == 1);
  CHECK((rows[0].op == "aten::cat" && rows[0].source == "transformers/cache_utils.py:120"));
}

TEST_CASE("equal allocations of one line are counted", "[report]") {
  Blocks blocks;
  for (int i = 0; i < 28; ++i) blocks.add(Category::output, "", 384_MiB, "", "aten::cdist", "train.py:39");
  const auto rows = fold_holders(blocks.state(), CommonReferrers({}));
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].block_bytes == 384_MiB);
  ReportOfDevice device{.categories = {{"output", 28 * 384_MiB}}, .top_allocations = rows};
  device.memory.allocated_bytes = 28 * 384_MiB;
  CHECK(holders_table(device, {}).find("aten::cdist  train.py:39  28 × 384.00 MiB") != std::string::npos);
}

TEST_CASE("the batch size is what first sizes have in common", "[report]") {
  CHECK(find_batch(Blocks()
                       .add(Category::activation, "h", 6_MiB, "[8, 1024, 768] float32")
                       .add(Category::activation, "h", 6_MiB, "[8192, 3072] float32")
                       .state()) == 8);
  CHECK(find_batch(Blocks().add(Category::activation, "conv", 6_MiB, "[64, 3, 224, 224] float32").state()) == 64);
  CHECK(find_batch(Blocks()
                       .add(Category::activation, "a", 6_MiB, "[7, 3] float32")
                       .add(Category::activation, "b", 6_MiB, "[5, 3] float32")
                       .state()) == std::nullopt);
  Blocks casts;  // of a weight, which has no examples; and rows of tokens, of which nobody chooses how many
  casts.add(Category::parameter, "head", 1_MiB, "[1200, 96] float32")
      .add(Category::activation, "head", 1_MiB, "[96, 1200] bfloat16")
      .add(Category::activation, "hidden", 1_MiB, "[1536, 96] bfloat16");
  CHECK(find_batch(casts.state()) == std::nullopt);
  CHECK(find_batch(casts.add(Category::activation, "x", 1_MiB, "[24, 64, 96] float32").state()) == 24);
  CHECK(find_batch(Blocks()  // of an RNN the length may come first
                       .add(Category::input, "", 1_MiB, "[256, 60, 24] float32")
                       .add(Category::activation, "rnn", 9_MiB, "[60, 256, 512] float32")
                       .state()) == 256);
  CHECK(find_batch(MemoryState{}) == std::nullopt);
  CHECK(find_batch(Blocks()  // of tokens most is saved for all at once, and the inputs show the sequences
                       .add(Category::input, "tokens", 4_KiB, "[8, 64] int64")
                       .add(Category::activation, "block", 64_KiB, "[8, 64, 32] float32")
                       .add(Category::activation, "logits", 6_MiB, "[512, 3000] float32")
                       .state()) == 8);
  CHECK(find_batch(Blocks()  // the tokens of one sequence are no batch
                       .add(Category::input, "ids", 1_MiB, "[1, 32768] int64")
                       .add(Category::activation, "h", 6_MiB, "[32768, 4096] float32")
                       .state()) == std::nullopt);

  MemoryState many;  // 10¹⁰ divisions if each size is held against each
  std::vector<std::string> shapes;
  for (int size = 1'000'000; size < 1'100'000; ++size) shapes.push_back(fmt::format("[{}, 2] float32", size));
  for (const std::string& shape : shapes) {
    many.blocks.push_back({.bytes = 1_MiB, .category = Category::activation, .shape = shape});
  }
  CHECK(find_batch(many) == std::nullopt);
}

TEST_CASE("the report on a foreign program that fits has its largest batch, and that the batch was inferred",
          "[report]") {
  const Report report = make_report(training_that_fits(), {.exit_code = 0});
  REQUIRE(report.devices.front().batch);
  CHECK(report.devices.front().batch->batch == 64);
  CHECK(report.devices.front().batch->inferred);
  CHECK(to_text(report).find("64 (inferred from tensor shapes) fits; up to ") != std::string::npos);
}

}  // namespace oomdiag
