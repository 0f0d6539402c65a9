#include <map>
#include <random>

#include "profiler/snapshot/align.h"
#include "profiler/snapshot/compare.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

namespace {

/// A training loop of `steps` steps whose batch takes `bytes`.
Trace run(int steps, int64_t bytes, int extra_at = -1) {
  EventBuilder trace;
  trace.segment(20_MiB).segment(20_MiB).op({.op = "aten::conv2d", .module = "conv", .source = "train.py:31"});
  trace.alloc("weight", 2_MiB);
  for (int step = 0; step < steps; ++step) {
    trace.op({.op = "aten::relu", .module = "relu", .source = "train.py:32"}).alloc("saved", bytes);
    trace.op({.op = "aten::mm", .module = "fc", .source = "train.py:33"}).alloc("small", 512 * (step % 7 + 1));
    if (step == extra_at) trace.op({.op = "aten::clone", .source = "train.py:34"}).alloc("extra", 4096).free("extra");
    trace.free("small").free("saved");
  }
  return trace;
}

std::vector<uint64_t> random_elements(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> elements(count);
  for (uint64_t& element : elements) element = (random() % 50) << 4 | (1 + random() % 2);
  return elements;
}

}  // namespace

TEST_CASE("a sequence aligns with itself without a gap", "[compare]") {
  const auto elements = random_elements(5000, 1);
  CHECK(align(elements, elements, 10) == Alignment{.equal = 5000});
  CHECK(align({}, {}, 10) == Alignment{});
  CHECK(align(elements, {}, 10) == Alignment{.left_rest = 5000});
}

TEST_CASE("extra, missing and changed elements are found where they are, near or far", "[compare]") {
  const auto elements = random_elements(30000, 2);
  const size_t extra = GENERATE(1, 7, 40, 3000);
  auto longer = elements;
  const auto more = random_elements(extra, 3);
  longer.insert(longer.begin() + 100, more.begin(), more.end());
  longer[25] ^= 1 << 12;

  const Alignment found = align(elements, longer, 2);
  CHECK(found.changed == 1);
  CHECK(found.only_left == 0);
  CHECK(found.only_right == extra);
  CHECK(found.equal == elements.size() - 1);
  REQUIRE(found.first.size() == 2);
  CHECK(found.first[0] == Gap{Gap::Kind::changed, 25, 25});
  CHECK(found.first[1].kind == Gap::Kind::only_right);
}

TEST_CASE("whatever two sequences are, every element is accounted for", "[compare][fuzz]") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 300; ++round) {
    const auto left = random_elements(random() % 300, random()), right = random_elements(random() % 300, random());
    const Alignment found = align(left, right, 5);
    CHECK(found.equal + found.changed + found.only_left + found.left_rest == left.size());
    CHECK(found.equal + found.changed + found.only_right + found.right_rest == right.size());
  }
}

TEST_CASE("as many elements are equal as a longest common subsequence has", "[compare][fuzz]") {
  std::mt19937_64 random(9);
  for (int round = 0; round < 200; ++round) {
    const auto left = random_elements(random() % 80, random()), right = random_elements(random() % 80, random());
    std::vector<std::vector<uint64_t>> longest(left.size() + 1, std::vector<uint64_t>(right.size() + 1));
    for (size_t i = 1; i <= left.size(); ++i) {
      for (size_t j = 1; j <= right.size(); ++j) {
        longest[i][j] =
            left[i - 1] == right[j - 1] ? longest[i - 1][j - 1] + 1 : std::max(longest[i - 1][j], longest[i][j - 1]);
      }
    }
    CHECK(align(left, right, 5).equal == longest[left.size()][right.size()]);
  }
}

TEST_CASE("sequences that have nearly nothing in common are aligned in a moment", "[compare]") {
  const auto left = random_elements(30000, 11), right = random_elements(25000, 12);
  const Alignment found = align(left, right, 5);
  CHECK(found.equal > 4000);
  CHECK(found.equal + found.changed + found.only_left + found.left_rest == left.size());
}

TEST_CASE("two recordings of the same program are equal", "[compare]") {
  const Comparison found = compare(run(500, 3_MiB), run(500, 3_MiB), 0);
  CHECK(found.is_equal());
  CHECK(found.blocks.equal_percent() == 100);
  CHECK(found.blocks.equal == 1 + 500 * 4);
  CHECK(found.segments.equal == 3);
  CHECK(found.left_peak_bytes == found.right_peak_bytes);
  CHECK(found.left_peak_bytes > 5_MiB);
}

TEST_CASE("another batch size: the first difference is named with both sizes and its line", "[compare]") {
  const Comparison found = compare(run(500, 3_MiB), run(500, 4_MiB), 0);
  CHECK_FALSE(found.is_equal());
  CHECK(found.blocks.changed == 1000);
  CHECK(found.blocks.only_left + found.blocks.only_right == 0);
  REQUIRE(found.blocks.first.size() == 10);
  const Difference& first = found.blocks.first[0];
  CHECK(first.left.what == "alloc");
  CHECK(first.left.number == 2);
  CHECK(first.left.bytes == 3_MiB);
  CHECK(first.right.bytes == 4_MiB);
  CHECK(first.right.where == "aten::relu, relu, train.py:32");
  CHECK(found.right_peak_bytes - found.left_peak_bytes == 1_MiB);
}

TEST_CASE("a run whose workspaces have other sizes is of the same program, one of another batch size is not",
          "[compare]") {
  Comparison found;
  found.blocks.left_events = 1000;
  found.blocks.right_events = 1004;
  found.blocks.equal = 950;
  found.blocks.changed = 50;
  found.left_peak_bytes = 1000_MiB;
  found.right_peak_bytes = 1001_MiB;
  CHECK(found.is_same_program());
  found.right_peak_bytes = 1020_MiB;
  CHECK_FALSE(found.is_same_program());
  found.right_peak_bytes = 1000_MiB;
  found.blocks.changed = 20;
  found.blocks.only_left = 30;
  CHECK_FALSE(found.is_same_program());
  CHECK_FALSE(compare(run(500, 3_MiB), run(500, 4_MiB), 0).is_same_program());
  CHECK(compare(run(500, 3_MiB), run(500, 3_MiB), 0).is_same_program());
}

TEST_CASE("a program that allocates once more differs by that", "[compare]") {
  const Comparison found = compare(run(100, 3_MiB), run(100, 3_MiB, 50), 0);
  CHECK_FALSE(found.is_equal());
  CHECK(found.blocks.changed == 0);
  CHECK(found.blocks.only_right == 2);
  REQUIRE(found.blocks.first.size() == 2);
  CHECK(found.blocks.first[0].left.what.empty());
  CHECK(found.blocks.first[0].right.where == "aten::clone, train.py:34");
}

TEST_CASE("what a trace shows after the snapshot was taken is not compared", "[compare]") {
  Trace snapshot = run(10, 3_MiB);
  snapshot.process.snapshot = true;
  const Comparison found = compare(snapshot, run(20, 3_MiB), 0);
  CHECK(found.is_equal());
  CHECK(found.blocks.right_rest == 40);
  CHECK_FALSE(compare(run(10, 3_MiB), run(20, 3_MiB), 0).is_equal());
}

namespace {

/// What a snapshot of a run shows whose history begins with alloc or free number `first` and ends before number `last`.
Trace window(const Trace& whole, uint64_t first, uint64_t last) {
  Trace part = whole;
  part.process.snapshot = true;
  std::map<uint64_t, Event> alive;
  std::vector<Event> events;
  uint64_t number = 0;
  for (const Event& event : whole.events) {
    const bool is_block = event.kind == EventKind::alloc || event.kind == EventKind::free_requested;
    if (number >= last) break;
    if (number >= first) {
      events.push_back(event);
    } else if (event.kind == EventKind::alloc) {
      alive[event.address] = event;
    } else if (event.kind == EventKind::free_requested) {
      alive.erase(event.address);
    }
    number += is_block;
  }
  for (const auto& [address, event] : alive) part.initial.push_back(event);
  part.events = EventLog(std::move(events));
  return part;
}

}  // namespace

TEST_CASE("a snapshot whose history began late is laid beside what it shows", "[compare]") {
  const Trace whole = run(500, 3_MiB, 420);
  const Trace part = window(whole, 1 + 400 * 4 + 2, 1 + 480 * 4);
  const bool swapped = GENERATE(false, true);
  const Comparison found = swapped ? compare(whole, part, 0) : compare(part, whole, 0);
  REQUIRE(found.window);
  CHECK(found.left_begins_late == !swapped);
  CHECK(found.window->blocks_before == 1 + 400 * 4 + 2);
  CHECK(found.window->alive == 3);
  CHECK(found.window->alive_elsewhere == 0);
  CHECK(found.blocks.equal_percent() == 100);
  CHECK(found.blocks.equal == 80 * 4 - 2);
  CHECK(found.left_peak_bytes == found.right_peak_bytes);
}

TEST_CASE("a window of another run differs by where it differs", "[compare]") {
  Trace part = window(run(500, 3_MiB, 420), 1 + 400 * 4, 1 + 480 * 4);
  const Comparison found = compare(part, run(500, 3_MiB), 0);
  REQUIRE(found.window);
  CHECK(found.blocks.only_left == 2);
  CHECK(found.blocks.changed == 0);
  CHECK_FALSE(found.is_equal());

  part.initial.front().bytes += 512;  // another weight
  const Comparison other = compare(part, run(500, 3_MiB, 420), 0);
  REQUIRE(other.window);
  CHECK(other.blocks.is_equal());
  CHECK(other.window->alive_elsewhere == 2);
  CHECK_FALSE(other.is_equal());
}

TEST_CASE("what agrees by chance only is no window", "[compare]") {
  const Trace part = window(run(300, 7_MiB), 1 + 200 * 4, 1 + 290 * 4);
  CHECK_FALSE(compare(part, run(500, 3_MiB), 0).window);
}

TEST_CASE("segments that are freed before the first alloc of a window count", "[compare]") {
  EventBuilder trace;
  trace.segment(20_MiB).alloc("weight", 2_MiB);
  for (int step = 0; step < 60; ++step) trace.alloc("a", 512 * (step + 1)).free("a");
  trace.segment(40_MiB).segment(60_MiB);
  for (int step = 0; step < 60; ++step) trace.alloc("b", 1024 * (step + 100)).free("b");
  const Trace whole = trace;
  Trace part = window(whole, 1 + 60 * 2, ~uint64_t{0});  // begins with the two segments

  const Comparison found = compare(part, whole, 0);
  REQUIRE(found.window);
  CHECK(found.segments.left_events == 2);
  CHECK(found.segments.equal == 2);
  CHECK(found.segments.is_equal());
}

TEST_CASE("where all events are equal the peak may differ by what is guessed of older blocks, and by no more",
          "[compare]") {
  Comparison found;
  found.left_peak_bytes = 8481'021;
  found.right_peak_bytes = 8510'275;
  CHECK_FALSE(found.is_equal());
  found.sizes_are_guessed = true;
  CHECK(found.is_equal());
  found.right_peak_bytes = 8530'000;
  CHECK_FALSE(found.is_equal());
}

TEST_CASE("what another version of PyTorch does differently is reported in one line", "[compare]") {
  const auto train = [](bool per_product, int64_t extra) -> Trace {
    EventBuilder trace;
    trace.segment(20_MiB).segment(20_MiB);
    for (int step = 0; step < 50; ++step) {
      trace.op({.op = "aten::mm", .source = "train.py:7"}).alloc("out", 4096 * (step + 1));
      if (per_product) trace.alloc("workspace", 8_MiB + 128_KiB).free("workspace");
      if (extra > 0 && step == 30) trace.alloc("extra", extra).free("extra");
      trace.free("out");
    }
    const Trace& result = trace;
    return result;
  };
  CHECK(compare(train(false, 0), train(true, 0), 0).blocks.version_difference.starts_with("cuBLAS workspaces"));
  CHECK(compare(train(false, 0), train(true, 1536), 0).blocks.version_difference.empty());
  CHECK(compare(train(true, 0), train(true, 0), 0).blocks.version_difference.empty());
}

TEST_CASE("the fewest differences are found where a sequence differs at every third element", "[compare]") {
  auto left = random_elements(3000, 7), right = left;
  for (size_t i = 0; i + 3 < right.size(); i += 3) right.erase(right.begin() + static_cast<std::ptrdiff_t>(i));
  const Alignment found = align(left, right, 1);
  CHECK(found.equal == right.size() - found.right_rest);
  CHECK(found.only_left + found.left_rest == left.size() - right.size());
  CHECK(found.changed == 0);
}

TEST_CASE("where only the order of frees differs it is said", "[compare]") {
  const auto freed = [](const char* first, const char* second) {
    EventBuilder trace;
    trace.segment(20_MiB).alloc("a", 1_MiB).alloc("b", 2_MiB).free(first).free(second);
    return Trace(trace);
  };
  const Comparison found = compare(freed("a", "b"), freed("b", "a"), 0);
  CHECK_FALSE(found.is_equal());
  CHECK(found.only_frees_differ);
  CHECK_FALSE(compare(run(5, 3_MiB), run(5, 4_MiB), 0).only_frees_differ);
}
