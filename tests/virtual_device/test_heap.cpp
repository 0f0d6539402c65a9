#include <vector>

#include "extension/virtual_device/driver/small_heap.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("free ranges that touch are one", "[virtual_device]") {
  FreeRanges ranges;
  ranges.give(100, 50);
  ranges.give(200, 50);
  CHECK(ranges.give(150, 50) == FreeRanges::Range{100, 150});
  CHECK(ranges.take_highest(20) == 230);
  CHECK(ranges.take_lowest(100) == 100);
  CHECK(ranges.take_lowest(31) == std::nullopt);
  CHECK(ranges.take_highest(30) == 200);
}

TEST_CASE("free ranges are not joined across a border", "[virtual_device]") {
  FreeRanges ranges(100);
  ranges.give(50, 50);
  CHECK(ranges.give(100, 50) == FreeRanges::Range{100, 50});
  CHECK(ranges.take_lowest(60) == std::nullopt);
}

TEST_CASE("small blocks fill a page before the next, and give it back when the last goes", "[virtual_device]") {
  constexpr uintptr_t kFirst = 64 << 20;
  constexpr uintptr_t kSecond = kFirst + kPageBytes;
  SmallHeap heap;
  CHECK(heap.take(1) == std::nullopt);
  heap.add_page(kFirst);
  std::vector<uintptr_t> blocks;
  while (const auto block = heap.take(1000)) blocks.push_back(*block);
  CHECK(blocks.size() == 2048);
  CHECK(blocks[1] == kFirst + 1024);
  heap.add_page(kSecond);
  CHECK(heap.take(SmallHeap::kMaxBytes) == kSecond);
  CHECK(heap.give(blocks[7]) == std::nullopt);
  CHECK(heap.take(600) == blocks[7]);
  CHECK(heap.give(kSecond) == kSecond);
  for (const uintptr_t block : blocks) CHECK((heap.give(block) == kFirst) == (block == blocks.back()));
  CHECK(heap.take(1) == std::nullopt);
}
