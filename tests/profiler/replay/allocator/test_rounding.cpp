#include "profiler/replay/allocator/rounding.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {

TEST_CASE("requests are rounded up to 512 bytes", "[replay]") {
  CHECK(round_size(1, {}) == 512);
  CHECK(round_size(512, {}) == 512);
  CHECK(round_size(513, {}) == 1024);
  CHECK(round_size(4_MiB + 1, {}) == 4_MiB + 512);
}

TEST_CASE("segments are 2 MiB, 20 MiB, or a multiple of 2 MiB", "[replay]") {
  CHECK(segment_size(1_MiB, {}) == 2_MiB);
  CHECK(segment_size(1_MiB + 512, {}) == 20_MiB);
  CHECK(segment_size(10_MiB - 512, {}) == 20_MiB);
  CHECK(segment_size(10_MiB, {}) == 10_MiB);
  CHECK(segment_size(21_MiB, {}) == 22_MiB);
  CHECK(segment_size(2_MiB, {.large_segment_bytes = 64_MiB}) == 64_MiB);
}

TEST_CASE("roundup_power2_divisions rounds to steps between powers of two", "[replay]") {
  const auto settings = parse_allocator_settings("roundup_power2_divisions:4");

  CHECK(round_size(1200, settings) == 1536);  // too small for steps: 512 bytes
  CHECK(round_size(5000, settings) == 5120);  // 4096 + 1024
  CHECK(round_size(4096, settings) == 4096);
  CHECK(round_size(9_MiB, settings) == 10_MiB);  // 8 + 2
}

TEST_CASE("roundup_power2_divisions may differ by size", "[replay]") {
  const auto settings = parse_allocator_settings("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");

  CHECK(settings.roundup_power2_divisions[0] == 1);
  CHECK(settings.roundup_power2_divisions[8] == 1);
  CHECK(settings.roundup_power2_divisions[9] == 2);
  CHECK(settings.roundup_power2_divisions[10] == 4);
  CHECK(settings.roundup_power2_divisions[15] == 8);
  CHECK(round_size(600_MiB, settings) == 768_MiB);
  CHECK(round_size(300_MiB + 1, settings) == 300_MiB + 512);
}

TEST_CASE("allocator settings are read as PyTorch writes them", "[replay]") {
  const auto settings = parse_allocator_settings(
      "expandable_segments:True, max_split_size_mb:64,per_process_memory_fraction:0.5,roundup_power2_divisions:[64:8],"
      "garbage_collection_threshold:0.8,large_segment_size_mb:32");

  CHECK(settings.expandable_segments);
  CHECK(settings.max_split_bytes == 64_MiB);
  CHECK(settings.memory_fraction == 0.5);
  CHECK(settings.large_segment_bytes == 32_MiB);
  CHECK(settings.roundup_power2_divisions[6] == 8);
}

TEST_CASE("what PyTorch may take of a GPU is the least of its fraction and what others leave", "[replay]") {
  CHECK(available_bytes(12_GiB, 1_GiB, 1) == 11_GiB);
  CHECK(available_bytes(12_GiB, 1_GiB, 0.5) == 6_GiB);
  CHECK(available_bytes(12_GiB, 8_GiB, 0.5) == 4_GiB);
}

TEST_CASE("settings that make no sense are left at their defaults", "[replay]") {
  for (const char* text : {"", ",,,", "max_split_size_mb", "max_split_size_mb:", "max_split_size_mb:-3", "a:b:c:[",
                           "max_split_size_mb:99999999999999999999", "per_process_memory_fraction:nan"}) {
    CHECK(parse_allocator_settings(text) == AllocatorSettings{});
  }
  CHECK(parse_allocator_settings("roundup_power2_divisions:[").roundup_power2_divisions[0] == 0);
}

TEST_CASE("whether a block is split depends on its pool and the settings", "[replay]") {
  CHECK(splits(1_KiB, 512, true, false, {}));
  CHECK_FALSE(splits(4_MiB, 1_MiB, false, false, {}));
  CHECK(splits(4_MiB, 1_MiB + 512, false, false, {}));
  CHECK(splits(4_MiB, 512, false, true, {}));
  CHECK_FALSE(splits(64_MiB, 8_MiB, false, false, {.max_split_bytes = 64_MiB}));
}

}  // namespace oomdiag
