#include <deque>
#include <filesystem>

#include "profiler/explain/facts/growth.h"
#include "profiler/replay/replay.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

// Growth where only the last steps of the run are left in the trace.

using namespace oomdiag;

namespace {

constexpr uint32_t kSteps = 3000;
constexpr int64_t kPiece = 1 << 20;

/// A training loop as the recorder would write it, whose trace holds about 150 steps.
class Loop {
 public:
  explicit Loop(const std::filesystem::path& file)
      : writer_(file, 1, {.event_bytes = 1 << 20, .chunk_bytes = 1 << 16, .slots_per_device = 1 << 13}) {
    writer_.header().devices[0].total_bytes = int64_t{1} << 40;
    writer_.count_steps_by_optimizer();
    scope_ = writer_.intern(std::string_view("Optimizer.step#SGD.step"));
    weight_ = place("aten::zeros");
    passing_ = place("aten::linear");
    alloc(weight_, 4 * kPiece);
  }

  uint32_t place(std::string_view op) { return writer_.intern(Context{.op = writer_.intern(op)}); }

  uint64_t alloc(uint32_t place, int64_t bytes) {
    Event event{
        .address = next_address_ += uint64_t{1} << 32, .bytes = bytes, .context = place, .kind = EventKind::alloc};
    event.sequence = write(event);
    writer_.add_block(event);
    return event.address;
  }
  void free(uint64_t address, int64_t bytes) {
    const Event event{.address = address, .bytes = bytes, .kind = EventKind::free_requested, .flags = kFreeCompleted};
    writer_.remove_block(0, address, write(event));
  }

  /// One step in which `keep` says what is left behind.
  template <class Keep>
  void step(uint32_t step, const Keep& keep) {
    for (int i = 0; i < 50; ++i) free(alloc(passing_, kPiece), kPiece);
    const uint64_t output = alloc(passing_, kPiece);  // the variable holds that of the step before until now
    if (output_ != 0) free(output_, kPiece);
    output_ = output;
    keep(step);
    write({.detail = scope_, .kind = EventKind::scope_begin});
    write({.detail = scope_, .kind = EventKind::scope_end});
    writer_.end_step(writer_.header().last_sequence.load());
  }

  void finish() { writer_.publish(); }

 private:
  uint64_t write(Event event) {
    event.thread = event.node_thread = 1;
    return writer_.write(event);
  }

  TraceWriter writer_;
  uint32_t scope_ = 0, weight_ = 0, passing_ = 0;
  uint64_t next_address_ = 0, output_ = 0;
};

/// What grows in a run of kSteps; `keep(loop, place, step)` is called in each, and once more after the last.
template <class Keep>
std::vector<Growth> grows_in(const Keep& keep) {
  const TestFolder folder;
  const std::filesystem::path file = folder.path() / "trace";
  {
    Loop loop(file);
    const uint32_t place = loop.place("aten::clone");
    for (uint32_t step = 1; step <= kSteps; ++step) loop.step(step, [&](uint32_t now) { keep(loop, place, now); });
    keep(loop, place, kSteps + 1);
    loop.finish();
  }
  const Trace trace = read_trace(file);
  REQUIRE(trace.overwritten_events > 0);
  REQUIRE(trace.step_of(trace.overwritten_events + 1) > kSteps - 300);
  const History history = replay(trace);
  std::vector<Growth> growths = find_growth(history.devices.at(0).curves);
  for (Growth& growth : growths) {
    CHECK(growth.held.op == "aten::clone");
    growth.held = {}, growth.places.clear();  // views into the trace
  }
  return growths;
}

// In the step in which the trace begins it is not known what outlives it.
bool is_within_two_steps(int64_t bytes, int64_t expected) {
  return bytes <= expected && bytes >= expected - 2 * kPiece;
}

}  // namespace

TEST_CASE("of a leak whose first steps were overwritten all is counted but what step 1 made", "[growth][bounded]") {
  const auto growths = grows_in([](Loop& loop, uint32_t place, uint32_t) { loop.alloc(place, kPiece); });

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].kind == GrowthKind::kept_tensors);
  CHECK(growths[0].bytes_per_step == kPiece);
  CHECK(growths[0].first_step == 1);
  CHECK(growths[0].last_step > kSteps - 10);  // where a sample was kept
  CHECK(is_within_two_steps(growths[0].grown_bytes, (growths[0].last_step - 1) * kPiece));
}

TEST_CASE("a leak too slow for the steps that are left is found by what it left behind", "[growth][bounded]") {
  const auto growths = grows_in([](Loop& loop, uint32_t place, uint32_t step) {
    if (step % 60 == 0) loop.alloc(place, 60 * kPiece);
  });

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].grown_bytes == growths[0].last_step / 60 * 60 * kPiece);
  CHECK(growths[0].bytes_per_step > kPiece / 2);
  CHECK(growths[0].bytes_per_step < kPiece * 2);
}

TEST_CASE("what an exception frees after the last step does not hide a leak", "[growth][bounded]") {
  std::deque<uint64_t> kept;
  const auto growths = grows_in([&](Loop& loop, uint32_t place, uint32_t step) {
    if (step <= kSteps) {
      kept.push_back(loop.alloc(place, kPiece));
    } else {
      for (const uint64_t address : kept) loop.free(address, kPiece);
    }
  });

  REQUIRE(growths.size() == 1);
  CHECK(is_within_two_steps(growths[0].grown_bytes, (growths[0].last_step - 1) * kPiece));
}

TEST_CASE("large state that step 1 made is no growth, however few steps are left", "[growth][bounded]") {
  CHECK(grows_in([](Loop& loop, uint32_t place, uint32_t step) {
          for (int i = 0; step == 1 && i < 1000; ++i) loop.alloc(place, kPiece);
        }).empty());
}

TEST_CASE("a cache that levelled off before the oldest step that is left is no growth", "[growth][bounded]") {
  const uint32_t full = GENERATE(20u, 400u, 1200u);
  CHECK(grows_in([&](Loop& loop, uint32_t place, uint32_t step) {
          if (step <= full) loop.alloc(place, kPiece);
        }).empty());
}

TEST_CASE("what keeps the last so many is no growth, though all that it holds is young", "[growth][bounded]") {
  const uint32_t most = GENERATE(2u, 100u, 1000u, 2500u);
  std::deque<uint64_t> kept;
  CHECK(grows_in([&](Loop& loop, uint32_t place, uint32_t) {
          kept.push_back(loop.alloc(place, kPiece));
          if (kept.size() <= most) return;
          loop.free(kept.front(), kPiece);
          kept.pop_front();
        }).empty());
}

TEST_CASE("what is replaced more seldom than the steps that are left reach is no growth", "[growth][bounded]") {
  const size_t most = GENERATE(1u, 3u);
  std::deque<uint64_t> kept;
  CHECK(grows_in([&](Loop& loop, uint32_t place, uint32_t step) {
          if (step % 400 != 0) return;
          kept.push_back(loop.alloc(place, 100 * kPiece));
          if (kept.size() <= most) return;
          loop.free(kept.front(), 100 * kPiece);
          kept.pop_front();
        }).empty());
}

TEST_CASE("a leak that begins late, or after a warm-up at its place, counts from then on", "[growth][bounded]") {
  const bool warm_up = GENERATE(false, true);
  const auto growths = grows_in([&](Loop& loop, uint32_t place, uint32_t step) {
    if (warm_up && step <= 20) loop.alloc(place, 500 * kPiece);
    if (step > 1500) loop.alloc(place, kPiece);
  });

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].bytes_per_step == kPiece);
  CHECK(growths[0].grown_bytes <= 1500 * kPiece);
  CHECK(growths[0].grown_bytes > 1300 * kPiece);
}
