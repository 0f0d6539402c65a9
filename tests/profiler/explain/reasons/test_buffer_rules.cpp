#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// The rows of buffer_rules.cpp, with values: what makes each hold, and what looks alike and is another reason or none.

namespace oomdiag {

TEST_CASE("a buffer that grows by another op than cat() is one too, a small one beside it is not named",
          "[explain][reasons]") {
  const DeviceHistory device = at_oom({kept_activation(100_MiB, 4)});
  const Growth large{.kind = GrowthKind::growing_buffer,
                     .bytes_per_step = 20_MiB,
                     .grown_bytes = 90_MiB,
                     .held = {.op = "aten::new_full", .source = "eval.py:30"},
                     .referrer = "variable 'preds' in evaluate (eval.py:4)"};
  Growth small = large;
  small.bytes_per_step = 32;
  small.held = {.op = "aten::cat", .source = "eval.py:53"};
  const auto reason = find_reason({.device = device, .growths = {small, large}});
  REQUIRE(reason);
  CHECK(reason->text ==
        "results are concatenated on the GPU in variable 'preds' in evaluate (eval.py:4), 20.00 MiB more per step "
        "(eval.py:30)");
}

TEST_CASE("what the same line of a package has joined before is concatenated, though no variable leads to it",
          "[explain][reasons]") {
  const Where joined{.op = "aten::cat", .source = "train.py:46", .inner_source = "trainer_pt_utils.py:86"};
  DeviceHistory device =
      at_oom({{.bytes = 230_MiB, .requested_bytes = 230_MiB, .category = Category::output, .made = joined}});
  device.failure->requested_bytes = 300_MiB;
  device.failure->where = joined;
  device.step_allocations = {.step = 5,
                             .blocks = {{.bytes = 1_MiB, .born = 1, .made = {.op = "aten::relu", .module = "0"}}}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "growing_buffer");
  CHECK(reason->text ==
        "results are concatenated on the GPU at train.py:46: 230.00 MiB so far, and both are there while aten::cat "
        "joins them");
  device.state.blocks.front().made.inner_source = "modeling.py:9";
  CHECK(reason_of(device) != "growing_buffer");
}

TEST_CASE("a result that one line makes larger each time is concatenated", "[explain][reasons]") {
  LiveBlock before{.bytes = 88_MiB,
                   .requested_bytes = 88_MiB,
                   .category = Category::output,
                   .step = 5,
                   .made = {.op = "aten::cat", .source = "eval.py:9"},
                   .shape = "[384, 60000] float32"};
  DeviceHistory device = at_oom({before});
  device.failure->where = {.op = "aten::cat", .source = "eval.py:9"};
  device.failure->requested_bytes = 102_MiB;
  CHECK(reason_of(device) != "growing_buffer");  // nobody keeps it
  device.referrers = {
      {.variable = "variable 'preds' in evaluate (eval.py:3)", .made = before.made, .storage_bytes = 88_MiB}};
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "growing_buffer");
  CHECK(reason->text ==
        "results are concatenated on the GPU in variable 'preds' in evaluate (eval.py:3) at eval.py:9: 88.00 MiB, "
        "[384, 60000] float32 so far, and both are there while aten::cat joins them");
  device.failure->requested_bytes = 500_MiB;  // parts are joined once
  CHECK(reason_of(device) != "growing_buffer");
}

}  // namespace oomdiag
