#include <random>

#include "profiler/trace/packed_events.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

namespace {

/// As an allocator's history has them, and now and then one that has not.
Event any_event(std::mt19937_64& random) {
  Event event{.time = random() % 3 == 0 ? random() : random() % 1000,
              .address = random() % 8 == 0 ? random() : 0x7f0000000000 + random() % 4096 * 512,
              .bytes = random() % 8 == 0 ? static_cast<int64_t>(random()) : static_cast<int64_t>(random() % 4096 * 512),
              .detail = random() % 4,
              .context = static_cast<uint32_t>(random() % 3 == 0 ? random() : random() % 100),
              .kind = static_cast<EventKind>(random() % 32)};
  event.thread = event.device = static_cast<uint8_t>(random() % 5 == 0 ? random() : 0);
  if (random() % 20 == 0) event.flags = static_cast<uint16_t>(random());
  if (random() % 20 == 0) event.node_sequence = random();
  return event;
}

}  // namespace

TEST_CASE("packed events are those that were packed, numbered in their order", "[trace]") {
  std::mt19937_64 random(7);
  EventPacker packer;
  std::vector<Event> given;
  for (int i = 0; i < 5000; ++i) {
    Event event = given.empty() || random() % 4 != 0 ? any_event(random) : given.back();
    event.kind = static_cast<EventKind>(random() % 32);
    packer.add(event);
    event.sequence = given.size() + 1;
    given.push_back(event);
  }
  const EventLog log = log_of(packer.finish());
  REQUIRE(log.size() == given.size());
  bool all = true;
  for (auto at = log.begin(); at != log.end(); ++at) all = all && *at == given[at.index()];
  CHECK(all);
  CHECK(log[2047] == given[2047]);
  CHECK(log[0] == given[0]);
  CHECK(log.back() == given.back());
}

TEST_CASE("an allocator's history takes less than 9 bytes an event", "[trace]") {
  std::mt19937_64 random(7);
  EventPacker packer;
  uint64_t time = 1'700'000'000'000'000;
  for (int i = 0; i < 30'000; ++i) {
    Event event{.time = time += random() % 20,
                .address = 0x7f0000000000 + random() % 8192 * 2_MiB,
                .bytes = static_cast<int64_t>(random() % 64) * 1_MiB,
                .context = static_cast<uint32_t>(random() % 400),
                .kind = EventKind::alloc};
    packer.add(event);
    event.kind = EventKind::free_requested;
    event.time += 50;
    packer.add(event);
    event.kind = EventKind::free_completed;
    packer.add(event);
  }
  const auto packed = packer.finish();
  CHECK(packed->size() == 90'000);
  CHECK(packed->bytes() < 9 * packed->size());
}
