#include <barrier>
#include <thread>
#include <vector>

#include "profiler/trace/chunk_list.h"
#include "profiler/trace/trace.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

// Who writes to which chunk of the trace: threads come and go, the budget is used up.

using namespace oomdiag;

namespace {

constexpr TraceBudget kSmall{.event_bytes = 64 << 12,
                             .chunk_bytes = 1 << 12,
                             .names_bytes = 1 << 12,
                             .contexts = 64,
                             .steps = 64,
                             .kept_events = 64,
                             .slots_per_device = 64};

void write_one(TraceWriter& writer, uint64_t address) {
  Event event{.address = address, .bytes = 1, .kind = EventKind::alloc};
  writer.write(event);
}

void write_in_a_thread(TraceWriter& writer, uint64_t address) {
  std::thread([&] { write_one(writer, address); }).join();
}

}  // namespace

TEST_CASE("what a thread leaves of its chunk goes to the next thread", "[trace][chunks]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1, kSmall);
  for (uint64_t thread = 1; thread <= 500; ++thread) write_in_a_thread(writer, thread);
  writer.publish();

  CHECK(writer.header().chunk_count.load() <= 500 / 63 + 1);
  const Trace trace = read_trace(folder.path() / "trace");
  REQUIRE(trace.events.size() == 500);
  for (uint64_t i = 0; i < 500; ++i) REQUIRE(trace.events[i].address == i + 1);
}

TEST_CASE("more threads at once than there are chunks lose events, which are counted; afterwards there is space again",
          "[trace][chunks]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1, kSmall);
  {
    std::barrier all(80);
    std::vector<std::jthread> threads;
    for (int t = 0; t < 80; ++t) {
      threads.emplace_back([&] { write_one(writer, 1), all.arrive_and_wait(); });
    }
  }
  CHECK(writer.header().dropped_events.load() == 80 - 64);
  write_in_a_thread(writer, 2);
  CHECK(writer.header().dropped_events.load() == 80 - 64);
}

TEST_CASE("a thread that rests keeps its chunk while others overwrite theirs many times", "[trace][chunks]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1, kSmall);
  write_one(writer, 1);
  std::thread([&] {
    for (uint64_t i = 0; i < 20'000; ++i) write_one(writer, 7);
  }).join();
  write_one(writer, 2);
  writer.publish();

  const Trace trace = read_trace(folder.path() / "trace");
  REQUIRE(trace.events.back().address == 2);
  CHECK(trace.events.size() > 61 * 63);
  CHECK(trace.overwritten_events + trace.events.size() == 20'002);
}

TEST_CASE("the chunk that is overwritten is the one whose newest event is the oldest", "[trace][chunks]") {
  ChunkList list(3, 10);
  for (uint32_t c = 0; c < 3; ++c) REQUIRE(list.take()->chunk == c);
  CHECK_FALSE(list.take().has_value());
  list.release(0, 10, 300);
  list.release(1, 10, 100);
  list.release(2, 10, 200);
  CHECK(list.take()->chunk == 1);
  CHECK(list.take()->chunk == 2);
  list.release(2, 4, 400);
  const auto rest = list.take();
  REQUIRE(rest.has_value());
  CHECK((rest->chunk == 2 && rest->used == 4));
}
