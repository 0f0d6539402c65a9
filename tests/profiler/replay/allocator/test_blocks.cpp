#include <random>

#include "profiler/replay/allocator/blocks.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

Blocks replayed(const Trace& trace, const AllocatorSettings& settings = {}) {
  Blocks blocks(settings);
  for (uint32_t i = 0; i < trace.events.size(); ++i) blocks.apply(trace.events[i], i);
  return blocks;
}

}  // namespace

TEST_CASE("a small request takes a multiple of 512 bytes of a 2 MiB segment", "[replay]") {
  const Blocks blocks = replayed(EventBuilder{}.alloc("a", 100).alloc("b", 513));

  CHECK(blocks.allocated_bytes() == 512 + 1024);
  CHECK(blocks.reserved_bytes() == 2_MiB);
}

TEST_CASE("a large block keeps what is left of its segment up to 1 MiB", "[replay]") {
  const Blocks blocks = replayed(EventBuilder{}.segment(20_MiB).alloc("a", 3_MiB).alloc("b", 16_MiB + 512_KiB));

  CHECK(blocks.allocated_bytes() == 20_MiB);
}

TEST_CASE("a large block gives back what is left beyond 1 MiB", "[replay]") {
  const Blocks blocks = replayed(EventBuilder{}.segment(20_MiB).alloc("a", 18_MiB));

  CHECK(blocks.allocated_bytes() == 18_MiB);
}

TEST_CASE("freed neighbours merge, so that a large request fits again", "[replay]") {
  EventBuilder trace;
  trace.segment(20_MiB).alloc("a", 6_MiB).alloc("b", 6_MiB).alloc("c", 6_MiB).free("a").free("c").free("b");
  trace.alloc("all", 20_MiB);

  CHECK(replayed(trace).allocated_bytes() == 20_MiB);
  CHECK(replayed(trace).reserved_bytes() == 20_MiB);
}

TEST_CASE("neighbouring segments never merge", "[replay]") {
  EventBuilder trace;
  trace.segment(20_MiB).segment(20_MiB).alloc("a", 20_MiB).alloc("b", 20_MiB).free("a").free("b").empty_cache();

  CHECK(replayed(trace).reserved_bytes() == 0);
}

TEST_CASE("segments of a private pool are known as its own, also when their blocks come and go", "[replay]") {
  constexpr uint64_t kBegin = uint64_t{1} << 40;
  Blocks blocks{AllocatorSettings{}};
  const auto apply = [&](EventKind kind, uint64_t address, int64_t bytes, uint8_t pool) {
    blocks.apply({.address = address, .bytes = bytes, .kind = kind, .flags = pool_flag(pool)}, 0);
  };
  apply(EventKind::segment_alloc, kBegin, 20_MiB, 3);
  apply(EventKind::alloc, kBegin, 6_MiB, 3);
  apply(EventKind::segment_alloc, kBegin + 20_MiB, 20_MiB, 0);
  apply(EventKind::free_requested, kBegin, 6_MiB, 0);
  apply(EventKind::free_completed, kBegin, 6_MiB, 0);
  const auto segments = blocks.by_segment();
  REQUIRE(segments.size() == 2);
  for (const auto& segment : segments) {
    REQUIRE(segment.size() == 1);
    CHECK(segment[0].pool == (segment[0].address == kBegin ? 3 : 0));
  }
}

TEST_CASE("the blocks of a mark stay as they were, whatever comes after it", "[replay]") {
  const auto look = [](const Blocks& blocks) {
    std::vector<std::vector<int64_t>> segments;
    for (const auto& segment : blocks.by_segment()) {
      auto& sizes = segments.emplace_back();
      for (const Block& block : segment) sizes.push_back(block.is_in_use() ? block.bytes : -block.bytes);
    }
    return segments;
  };
  EventBuilder trace;
  trace.segment(20_MiB).alloc("a", 6_MiB).alloc("b", 6_MiB).free("a").request_free("b");
  Blocks blocks = replayed(trace);
  blocks.mark();
  const auto then = look(blocks);
  const Trace whole =
      trace.alloc("c", 2_MiB).complete_free("b").segment(20_MiB).alloc("d", 16_MiB).free("c").empty_cache();
  for (uint32_t i = 5; i < whole.events.size(); ++i) blocks.apply(whole.events[i], i);

  CHECK(look(blocks.marked()) == then);
  CHECK(blocks.marked().pending_bytes() == 6_MiB);
  CHECK(look(blocks) != then);
  blocks.adopt({}, 0);
  CHECK(look(blocks.marked()) == then);
}

TEST_CASE("a freed block counts as pending until its free is completed", "[replay]") {
  EventBuilder trace;
  trace.alloc("a", 4_MiB).request_free("a");
  CHECK(replayed(trace).allocated_bytes() == 0);
  CHECK(replayed(trace).pending_bytes() == 4_MiB);

  trace.complete_free("a");
  CHECK(replayed(trace).pending_bytes() == 0);
}

TEST_CASE("an expandable segment grows beside its free end and splits at 512 bytes", "[replay]") {
  EventBuilder trace({.expandable = true});
  trace.alloc("a", 18_MiB).alloc("b", 30_MiB).free("b").alloc("c", 40_MiB);
  const Blocks blocks = replayed(trace, {.expandable_segments = true});

  CHECK(blocks.allocated_bytes() == 58_MiB);
  CHECK(blocks.reserved_bytes() == 60_MiB);
  CHECK(blocks.by_segment().size() == 1);
}

TEST_CASE("events of blocks that were never seen are harmless", "[replay]") {
  Trace trace;
  trace.events = {{.address = 4096, .bytes = 512, .kind = EventKind::free_requested},
                  {.address = 4096, .bytes = 512, .kind = EventKind::free_completed},
                  {.address = 8192, .bytes = 2_MiB, .kind = EventKind::segment_free},
                  {.address = 8192, .bytes = 2_MiB, .kind = EventKind::segment_unmap},
                  {.address = 8192, .bytes = -7, .kind = EventKind::alloc},
                  {.address = 8192, .bytes = INT64_MAX, .kind = EventKind::alloc}};

  CHECK(replayed(trace).allocated_bytes() == 0);
  CHECK(replayed(trace).reserved_bytes() == 0);
}

TEST_CASE("the allocator's own layout replaces a replay that began in the middle", "[replay]") {
  EventBuilder trace;
  trace.segment(20_MiB).alloc("a", 3_MiB).alloc("b", 16_MiB + 512_KiB);
  const auto before = trace.trace().events.size();
  trace.allocator().describe();

  Blocks blocks{AllocatorSettings{}};
  blocks.start_from(std::vector{trace.trace().events[1], trace.trace().events[2]}, {}, 0);
  CHECK(blocks.allocated_bytes() == 19_MiB + 512_KiB);
  blocks.adopt(std::span(trace.trace().events.in_memory()).subspan(before), 0);
  CHECK(blocks.allocated_bytes() == 20_MiB);
  CHECK(blocks.reserved_bytes() == 20_MiB);
  for (const Block& block : blocks.in_use()) CHECK((block.tag & Block::kInitial) != 0);
}

namespace {

struct Variant {
  const char* name;
  SimulatedAllocator::Settings simulated;
  AllocatorSettings replayed;
};

AllocatorSettings with_divisions(int64_t divisions) {
  AllocatorSettings settings;
  settings.roundup_power2_divisions.fill(divisions);
  return settings;
}

/// Random requests of all sizes on two streams, with late frees and emptied caches; compared after every event.
int compare_with_simulation(const Variant& variant, uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random); };
  Blocks blocks(variant.replayed);
  int wrong = 0;
  uint32_t events = 0;
  SimulatedAllocator allocator(variant.simulated, [&](const Event& event) { blocks.apply(event, events++); });
  std::vector<uint64_t> live;
  std::vector<uint64_t> pending;
  for (int i = 0; i < 1500; ++i) {
    const uint64_t action = below(100);
    if (action < 52) {
      const int64_t bytes = 1 + static_cast<int64_t>(below(uint64_t{1} << (1 + below(26))));
      if (const auto address = allocator.allocate(bytes, below(2))) live.push_back(*address);
    } else if (action < 98 && !live.empty()) {
      std::swap(live[below(live.size())], live.back());
      allocator.request_free(live.back());
      if (action < 60) {
        pending.push_back(live.back());
      } else {
        allocator.complete_free(live.back());
      }
      live.pop_back();
    } else if (action == 98) {
      for (const uint64_t address : pending) allocator.complete_free(address);
      pending.clear();
    } else if (action == 99) {
      allocator.empty_cache();
    }
    wrong += blocks.allocated_bytes() != allocator.allocated_bytes();
    wrong += blocks.reserved_bytes() != allocator.reserved_bytes();
    wrong += blocks.pending_bytes() != allocator.pending_bytes();
  }
  return wrong;
}

}  // namespace

TEST_CASE("the replay equals a simulated allocator after every one of many random events", "[replay][property]") {
  const Variant variants[] = {
      {"default", {.gpu_bytes = 2_GiB}, {}},
      {"nearly full GPU", {.gpu_bytes = 300_MiB}, {}},
      {"expandable", {.gpu_bytes = 2_GiB, .expandable = true}, {.expandable_segments = true}},
      {"expandable, nearly full", {.gpu_bytes = 300_MiB, .expandable = true}, {.expandable_segments = true}},
      {"divisions", {.gpu_bytes = 2_GiB, .divisions = 4}, with_divisions(4)},
      {"max_split_size", {.gpu_bytes = 2_GiB, .max_split_bytes = 24_MiB}, {.max_split_bytes = 24_MiB}},
  };
  for (const Variant& variant : variants) {
    for (uint32_t seed = 1; seed <= 6; ++seed) {
      INFO(variant.name << ", seed " << seed);
      CHECK(compare_with_simulation(variant, seed) == 0);
    }
  }
}

}  // namespace oomdiag
