#include <array>

#include "profiler/explain/facts/imbalance.h"
#include "profiler/explain/facts/owners.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

int64_t bytes_of(const std::vector<OwnedBytes>& list, std::string_view name) {
  for (const OwnedBytes& owned : list) {
    if (owned.name == name) return owned.bytes;
  }
  return -1;
}

LiveBlock made_in(std::string_view module, int64_t bytes) {
  LiveBlock block{.bytes = bytes, .requested_bytes = bytes};
  block.made.module = module;
  return block;
}

LiveBlock copied(std::string_view source, int64_t bytes, uint32_t step = 1) {
  LiveBlock block{.bytes = bytes, .requested_bytes = bytes, .category = Category::input, .step = step};
  block.made = {.op = "aten::to", .source = source};
  return block;
}

}  // namespace

TEST_CASE("a module owns what the modules inside of it own", "[explain][owners]") {
  MemoryState state;
  state.blocks = {made_in("layer1.conv1", 4_MiB), made_in("layer1.conv2", 2_MiB), made_in("layer2", 1_MiB),
                  made_in("", 8_MiB)};
  const Owners owners = list_owners(state);

  CHECK(bytes_of(owners.module, "layer1") == 6_MiB);
  CHECK(bytes_of(owners.module, "layer1.conv2") == 2_MiB);
  CHECK(bytes_of(owners.module, "layer2") == 1_MiB);
  CHECK(owners.module.front() == OwnedBytes{"", 8_MiB, 1});
}

TEST_CASE("a parameter belongs to its module, wherever it was made", "[explain][owners]") {
  MemoryState state;
  state.blocks = {made_in("", 4_MiB)};
  state.blocks[0].name = "layer1.conv1.weight";

  CHECK(bytes_of(list_owners(state).module, "layer1.conv1") == 4_MiB);
}

TEST_CASE("by op, line and shape every byte counts once, however long the list", "[explain][owners]") {
  MemoryState state;
  std::vector<std::string> lines;
  for (int i = 0; i < 300; ++i) lines.push_back("train.py:" + std::to_string(i));
  for (const std::string& line : lines) state.blocks.push_back(copied(line, 1_MiB));
  const Owners owners = list_owners(state);

  REQUIRE(owners.source.size() == kMaxOwned);
  CHECK(owners.source.back() == OwnedBytes{"others", 201_MiB, 201});
  CHECK(bytes_of(owners.op, "aten::to") == 300_MiB);
}

TEST_CASE("the largest block lives until the last node of backward that keeps it has run", "[explain][owners]") {
  const Trace trace = oom_in_backward();
  const auto life = follow_largest(replay(trace).devices.at(0).state);

  REQUIRE(life);
  CHECK(life->block.requested_bytes == 64_MiB);
  MemoryState state = replay(trace).devices.at(0).state;
  std::erase_if(state.blocks, [](const LiveBlock& block) { return block.category != Category::activation; });
  const auto activation = follow_largest(state);
  REQUIRE(activation);
  CHECK(activation->kept_by == Keeper::autograd);
  REQUIRE(activation->freed_by);
  CHECK(activation->freed_by->node == "ReluBackward0");
  CHECK_FALSE(follow_largest({}));
}

TEST_CASE("a GPU that is far fuller than the others is unbalanced, if an even share fits", "[explain][imbalance]") {
  const std::array<int64_t, 4> peaks = {10_GiB, 3_GiB, 3_GiB, 3_GiB};
  CHECK(find_imbalance(peaks, 0, 1_GiB, 11_GiB) == Imbalance{10_GiB, 3_GiB, 5_GiB});
  CHECK_FALSE(find_imbalance(peaks, 0, 1_GiB, 4_GiB));
  CHECK_FALSE(find_imbalance(peaks, 1, 1_GiB, 11_GiB));
}

TEST_CASE("GPUs that are as full as each other, or do other work, are not unbalanced", "[explain][imbalance]") {
  CHECK_FALSE(find_imbalance(std::array<int64_t, 3>{10_GiB, 9_GiB, 9_GiB}, 0, 1_GiB, 11_GiB));
  CHECK_FALSE(find_imbalance(std::array<int64_t, 2>{10_GiB, 2_MiB}, 0, 1_GiB, 11_GiB));
  CHECK_FALSE(find_imbalance(std::array<int64_t, 1>{10_GiB}, 0, 1_GiB, 11_GiB));
}

TEST_CASE("a GPU that came further in the failing step than the others is compared with their steps before",
          "[explain][imbalance]") {
  const auto is_uneven = [](int64_t other_before) {
    std::vector<DeviceHistory> devices(2);
    devices[0].phases = {{1, Phase::forward, 3_GiB}};
    devices[0].peak.allocated_bytes = 9_GiB;
    devices[0].state = {.allocated_bytes = 9_GiB, .reserved_bytes = 9_GiB, .free_bytes = 1_GiB};
    devices[0].failure = OutOfMemory{.step = 2, .requested_bytes = 2_GiB};
    devices[1].phases = {{1, Phase::forward, other_before}};
    devices[1].peak.allocated_bytes = other_before;
    CHECK_FALSE(compare_devices(devices, 1));  // it did not fail
    return compare_devices(devices, 0).has_value();
  };
  CHECK(is_uneven(1_GiB));
  CHECK_FALSE(is_uneven(3_GiB));  // as full as the first one in step 1: it would be so in step 2
}

}  // namespace oomdiag
