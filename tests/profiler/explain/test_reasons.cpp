#include "profiler/explain/fixes.h"
#include "profiler/explain/reasons.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

LiveBlock kept_activation(int64_t bytes, uint32_t step) {
  return {.bytes = bytes,
          .category = Category::activation,
          .phase = Phase::forward,
          .step = step,
          .made = {.op = "aten::gelu", .module = "0.act", .source = "net.py:9"},
          .shape = "[64, 64] float32"};
}

/// Ran out of memory in forward of step 5, for as much as is allocated.
DeviceHistory refused(std::vector<LiveBlock> blocks, std::string_view stack = {}) {
  DeviceHistory device;
  for (const LiveBlock& block : blocks) device.moment.allocated_bytes += block.bytes;
  device.moment.blocks = std::move(blocks);
  device.failure = OutOfMemory{.step = 5, .phase = Phase::forward, .requested_bytes = 64_MiB, .stack = stack};
  device.attribution.backward_bytes = 1_GiB;
  return device;
}

std::string reason_of(const DeviceHistory& device, const std::vector<Growth>& growths = {}) {
  const auto reason = find_reason({.device = device, .growths = growths});
  if (!reason) return {};
  CHECK(find_fix(reason->fix) != nullptr);
  return reason->id;
}

constexpr std::string_view kValidates = "/a/net.py:9 in forward\n/a/train.py:68 in validate\n/a/train.py:90 in main";

}  // namespace

TEST_CASE("evaluation that keeps graphs is told by the function that failed", "[explain][reasons]") {
  const DeviceHistory device = refused({kept_activation(100_MiB, 5), kept_activation(100_MiB, 5)}, kValidates);
  const auto reason = find_reason({.device = device, .growths = {}});
  REQUIRE(reason);
  CHECK(reason->id == "evaluation_keeps_graphs");
  CHECK(reason->text ==
        "evaluation keeps autograd graphs: 2 forward passes that no backward follows hold 200.00 MiB (validate(), "
        "train.py:68)");
  CHECK(reason->bytes == 200_MiB);
}

TEST_CASE("without graphs of this step evaluation is no reason", "[explain][reasons]") {
  CHECK(reason_of(refused({kept_activation(100_MiB, 4)}, kValidates)).empty());
  CHECK(reason_of(refused({}, kValidates)).empty());
  CHECK(reason_of(refused({kept_activation(100_MiB, 5)}, "/a/train.py:68 in train\n")).empty());
}

TEST_CASE("passes before one backward are counted where the program trains", "[explain][reasons]") {
  const std::vector<LiveBlock> four(4, kept_activation(100_MiB, 5));
  DeviceHistory device = refused(four);
  CHECK(reason_of(device) == "several_forward_passes");
  device.attribution.backward_bytes = 0;
  CHECK(reason_of(device) == "evaluation_keeps_graphs");
}

TEST_CASE("growth is named by what the program does", "[explain][reasons]") {
  const Where lstm{.op = "aten::lstm", .source = "train.py:16"};
  const Where cat{.op = "aten::cat", .source = "run.py:8"};
  const Where cache{.op = "aten::cat", .module = "h.0.attn", .source = "run.py:8"};
  const DeviceHistory device = refused({kept_activation(100_MiB, 4)});
  CHECK(reason_of(device, {{.kind = GrowthKind::retained_graph, .grown_bytes = 90_MiB, .places = {{.where = lstm}}}}) ==
        "recurrent_state");
  CHECK(reason_of(device, {{.kind = GrowthKind::growing_buffer, .grown_bytes = 90_MiB, .held = cat}}) ==
        "growing_buffer");
  CHECK(reason_of(device, {{.kind = GrowthKind::growing_buffer, .grown_bytes = 90_MiB, .held = cache}}) ==
        "key_value_cache");
}

TEST_CASE("a request is explained by the op and by the rows of its inputs", "[explain][reasons]") {
  DeviceHistory device =
      refused({{.bytes = 1_MiB, .shape = "[40000, 64] float32"}, {.bytes = 1_MiB, .shape = "[20000, 64] float32"}});
  device.failure->requested_bytes = int64_t{40000} * 20000 * 4;
  device.failure->where = {.op = "aten::cdist", .source = "pairs.py:3"};
  const auto pairs = find_reason({.device = device, .growths = {}});
  REQUIRE(pairs);
  CHECK(pairs->text == "all pairs at once: 40000 rows × 20000 rows of cdist are 2.98 GiB (pairs.py:3)");
  device.failure->where = {.op = "aten::linalg_svd", .source = "galore.py:18"};
  CHECK(reason_of(device) == "full_matrices");
  device.failure->where = {.node = "EmbeddingBackward0", .op = "aten::embedding"};
  CHECK(reason_of(device) == "dense_embedding_gradients");
  device.failure->where = {.op = "aten::relu"};
  CHECK(reason_of(device).empty());
}

TEST_CASE("double precision is a reason where half of the bytes have it", "[explain][reasons]") {
  CHECK(reason_of(refused({{.bytes = 200_MiB, .shape = "[1024] float64"}})) == "float64");
  CHECK(reason_of(refused({{.bytes = 20_MiB, .shape = "[1024] float64"}})).empty());
}

}  // namespace oomdiag
