#include "profiler/replay/allocator/initial_layout.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

/// A GPU with a segment of 20 MiB of which 4 MiB are taken, as the recorder tells it when it begins in the middle.
void begin_in_the_middle(Trace& trace) {
  constexpr uint64_t kSegment = 0x7000'0000'0000;
  const uint16_t flags = kBeforeRecording | kSegmentLarge;
  const auto block = [&](uint64_t offset, int64_t bytes, uint16_t state) {
    const uint16_t all = kBeforeRecording | state;
    return Event{.address = kSegment + offset,
                 .bytes = bytes,
                 .detail = static_cast<uint64_t>(bytes),
                 .kind = EventKind::block_state,
                 .flags = all};
  };
  std::vector<Event> events{{.address = kSegment, .bytes = 20_MiB, .kind = EventKind::segment_state, .flags = flags},
                            block(0, 4_MiB, kBlockAllocated),
                            block(4_MiB, 16_MiB, 0)};
  // Then the program takes 2 MiB of the hole, and gives back what was there before.
  events.push_back({.address = kSegment + 4_MiB, .bytes = 2_MiB, .kind = EventKind::alloc});
  events.push_back({.address = kSegment, .bytes = 4_MiB, .kind = EventKind::free_requested, .flags = kFreeCompleted});
  for (Event& event : events) event.sequence = trace.events.size() + 1, trace.events.push_back(event);
}

}  // namespace

TEST_CASE("a recording that begins in the middle knows what was there, and fits what follows", "[replay]") {
  Trace trace;
  trace.devices = {{.name = "Test GPU", .total_bytes = 1_GiB}};
  begin_in_the_middle(trace);
  const History history = replay(trace);
  REQUIRE(history.devices.size() == 1);
  const DeviceHistory& device = history.devices[0];
  CHECK(device.peak.allocated_bytes == 6_MiB);
  CHECK(device.peak.reserved_bytes == 20_MiB);
  CHECK(device.replay_error_bytes == 0);
  CHECK(device.timeline.back().allocated_bytes == 2_MiB);
  REQUIRE(device.state.blocks.size() == 2);
  CHECK(device.state.blocks[0].before_recording);
  CHECK(device.state.blocks[0].category == Category::unknown);
  CHECK_FALSE(device.state.blocks[1].before_recording);
}

TEST_CASE("a beginning is found at its first event only", "[replay]") {
  Trace trace;
  begin_in_the_middle(trace);
  CHECK(find_initial_layout(trace.events, 0).size() == 3);
  CHECK(find_initial_layout(trace.events, 1).empty());
  CHECK(find_initial_layout(trace.events, 3).empty());
}

TEST_CASE("steps are counted on from where recording began", "[replay]") {
  Trace trace;
  trace.devices = {{.name = "Test GPU", .total_bytes = 1_GiB}};
  trace.process.steps_before = 41;
  begin_in_the_middle(trace);
  CHECK(replay(trace).steps == 42);
}

}  // namespace oomdiag
