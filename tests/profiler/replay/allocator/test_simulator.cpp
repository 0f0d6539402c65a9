#include <random>

#include "profiler/replay/allocator/simulator.h"
#include "tests/caching_allocator.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

struct Live {
  uint32_t block = 0;
  uint64_t address = 0;
  bool requested = false;  ///< its free was
};

/// Random requests and frees, asked of the simulator and of the model of the tests, which was written from PyTorch's
/// description: both must say the same at every moment.
void compare(const AllocatorSettings& settings, SimulatedAllocator::Settings model_settings, uint32_t seed) {
  std::mt19937 random(seed);
  SimulatedAllocator model(model_settings, [](const Event&) {});
  AllocatorSimulator simulator(model_settings.gpu_bytes, settings);
  std::vector<Live> live;
  const auto below = [&](size_t most) { return std::uniform_int_distribution<size_t>(0, most - 1)(random); };
  for (int i = 0; i < 3000; ++i) {
    const size_t what = below(100);
    if (what < 55 || live.empty()) {
      const int64_t bytes = static_cast<int64_t>(1 + below(size_t{1} << (4 + below(22))));
      const uint32_t stream = below(8) == 0 ? 1 : 0;
      const auto address = model.allocate(bytes, stream);
      const uint32_t block = simulator.allocate(bytes, stream);
      REQUIRE(address.has_value() == (block != AllocatorSimulator::kRefused));
      if (address) live.push_back({.block = block, .address = *address});
    } else if (what == 99 && !settings.expandable_segments) {  // the model does not join what lies around a gap
      model.empty_cache();
      simulator.release_cached();
    } else {
      const size_t which = below(live.size());
      Live& one = live[which];
      if (!one.requested) {
        model.request_free(one.address);
        simulator.request_free(one.block);
        one.requested = true;
      }
      if (what % 8 != 0) {
        model.complete_free(one.address);
        simulator.complete_free(one.block);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
    REQUIRE(simulator.allocated_bytes() == model.allocated_bytes());
    REQUIRE(simulator.reserved_bytes() == model.reserved_bytes());
  }
}

}  // namespace

TEST_CASE("the simulator reserves what PyTorch's algorithm reserves", "[simulator]") {
  for (const uint32_t seed : {1u, 2u, 3u, 4u, 5u}) compare({}, {}, seed);
}

TEST_CASE("the simulator gives cached segments back on a full device, and refuses what then has no room",
          "[simulator]") {
  for (const uint32_t seed : {1u, 2u, 3u, 4u, 5u}) compare({}, {.gpu_bytes = 400_MiB}, seed);
}

TEST_CASE("the simulator grows expandable segments", "[simulator]") {
  const AllocatorSettings settings{.expandable_segments = true};
  for (const uint32_t seed : {1u, 2u, 3u, 4u, 5u}) compare(settings, {.expandable = true}, seed);
}

TEST_CASE("the simulator unmaps whole pages, and maps them again between what is free around them", "[simulator]") {
  AllocatorSimulator simulator(1_GiB, {.expandable_segments = true});
  const uint32_t first = simulator.allocate(30_MiB), second = simulator.allocate(50_MiB),
                 third = simulator.allocate(20_MiB);
  CHECK(simulator.reserved_bytes() == 100_MiB);
  simulator.free(second);  // from 30 to 80
  simulator.release_cached();
  CHECK(simulator.reserved_bytes() == 60_MiB);  // pages 40 to 80 went
  simulator.allocate(45_MiB);
  CHECK(simulator.reserved_bytes() == 100_MiB);
  simulator.free(first);
  simulator.free(third);
  simulator.release_cached();
  CHECK(simulator.reserved_bytes() == 60_MiB);  // 20 to 80 stay
}

TEST_CASE("the simulator rounds to divisions of powers of two, and spares oversize blocks", "[simulator]") {
  AllocatorSettings divided;
  divided.roundup_power2_divisions.fill(4);
  compare(divided, {.divisions = 4}, 1);
}

TEST_CASE("what the simulator has reserved at most stays known", "[simulator]") {
  AllocatorSimulator simulator(100_MiB, {});
  const uint32_t first = simulator.allocate(30_MiB);
  const uint32_t second = simulator.allocate(40_MiB);
  simulator.free(first);
  simulator.free(second);
  CHECK(simulator.reserved_bytes() == 70_MiB);
  CHECK(simulator.allocate(90_MiB) != AllocatorSimulator::kRefused);  // both went back
  CHECK(simulator.retries() == 1);
  CHECK(simulator.peak_reserved_bytes() == 90_MiB);
  CHECK(simulator.peak_allocated_bytes() == 90_MiB);
  CHECK(simulator.allocate(20_MiB) == AllocatorSimulator::kRefused);
}

}  // namespace oomdiag
