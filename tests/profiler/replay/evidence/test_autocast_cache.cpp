#include "profiler/replay/evidence/autocast_cache.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

LiveBlock parameter(std::string_view name, std::string_view shape, int64_t bytes) {
  return {.bytes = bytes, .requested_bytes = bytes, .category = Category::parameter, .name = name, .shape = shape};
}

LiveBlock cast(std::string_view module, std::string_view shape, int64_t bytes) {
  return {.bytes = bytes,
          .requested_bytes = bytes,
          .category = Category::activation,
          .made = {.op = "aten::linear", .inner = "aten::empty_strided", .module = module, .autocast = "bfloat16"},
          .shape = shape};
}

MemoryState moment_with(std::vector<LiveBlock> blocks) {
  MemoryState state;
  state.blocks = std::move(blocks);
  return state;
}

}  // namespace

TEST_CASE("each weight has at most one cast, in its own module", "[replay]") {
  const LiveBlock weight = parameter("fc.weight", "[1024, 1024] float32", 4_MiB);
  const AutocastUse use = find_autocast(moment_with({weight, cast("fc", "", 2_MiB), cast("fc", "", 2_MiB)}));
  CHECK(use == AutocastUse{.dtype = "bfloat16", .made_bytes = 4_MiB, .cache_bytes = 2_MiB});
  CHECK(find_autocast(moment_with({weight, cast("relu", "", 2_MiB)})).cache_bytes == 0);
  CHECK(find_autocast(moment_with({weight, cast("fc", "", 4_MiB)})).cache_bytes == 0);
}

TEST_CASE("casts of a weight beyond the first are repeated, inputs are not", "[replay]") {
  const LiveBlock weight = parameter("fc.weight", "[1024, 512] float32", 2_MiB);
  const LiveBlock again = cast("fc", "[1024, 512] float16", 1_MiB), input = cast("fc", "[512, 512] float16", 512_KiB);
  const AutocastUse use = find_autocast(moment_with({weight, again, again, again, input}));
  CHECK(use.cache_bytes == 1_MiB);
  CHECK(use.repeated_bytes == 2_MiB);
  CHECK(use.repeated_count == 2);
}

TEST_CASE("a tied weight is recognised by its shape, also as it was transposed", "[replay]") {
  const LiveBlock weight = parameter("wte.weight", "[1024, 512] float32", 2_MiB);
  CHECK(find_autocast(moment_with({weight, cast("lm_head", "[512, 1024] bfloat16", 1_MiB)})).cache_bytes == 1_MiB);
  CHECK(find_autocast(moment_with({weight, cast("lm_head", "[256, 2048] bfloat16", 1_MiB)})).cache_bytes == 0);
}

TEST_CASE("each of 50 000 casts finds its weight at once", "[replay]") {
  constexpr int kLayers = 50'000;
  std::vector<std::string> modules, names;
  for (int i = 0; i < kLayers; ++i) modules.push_back("h." + std::to_string(i));
  for (const std::string& module : modules) names.push_back(module + ".weight");
  std::vector<LiveBlock> blocks;
  for (const std::string& name : names) blocks.push_back(parameter(name, "[512, 512] float32", 1_MiB));
  for (int i = kLayers; i-- > 0;) blocks.push_back(cast(modules[static_cast<size_t>(i)], "", 512_KiB));
  CHECK(find_autocast(moment_with(std::move(blocks))).cache_bytes == kLayers * 512_KiB);  // 10⁹ comparisons else
}

TEST_CASE("results of ops, gradients and what needs no cast are no casts", "[replay]") {
  const LiveBlock weight = parameter("fc.weight", "[1024, 1024] float32", 4_MiB);
  LiveBlock result = cast("fc", "", 2_MiB);
  result.made.inner = "aten::addmm";
  LiveBlock gradient = cast("fc", "", 2_MiB);
  gradient.made.node = "AddmmBackward0";
  const AutocastUse use = find_autocast(moment_with({weight, result, gradient}));
  CHECK(use == AutocastUse{.dtype = "bfloat16", .made_bytes = 2_MiB});
  const LiveBlock half = parameter("fc.weight", "[1024, 2048] bfloat16", 4_MiB);
  CHECK(find_autocast(moment_with({half, cast("fc", "", 2_MiB)})).cache_bytes == 0);
  CHECK(find_autocast(moment_with({weight})) == AutocastUse{});
}

}  // namespace oomdiag
