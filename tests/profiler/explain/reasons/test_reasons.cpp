#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of kReasons, each with values: what makes it hold, and what looks alike and is another reason or none. A new row has a case in the
// file that is named after its rules; programs that it is for are in tests/causes.

namespace oomdiag {

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

TEST_CASE("a fix of every reason has a row", "[explain][reasons]") {
  for (const char* id :
       {"finer_checkpoints", "autocast_without_cache", "fused_or_single", "retry_outside_except", "one_graph_pool",
        "fused_attention", "class_indices", "loss_in_chunks", "no_sparse_gradient", "drop_models", "load_to_host",
        "data_on_host", "delete_outputs", "split_batch", "stop_growth"}) {
    CHECK(find_fix(id) != nullptr);
  }
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

}  // namespace oomdiag
