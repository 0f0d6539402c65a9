#include "profiler/trace/tail.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

/// A trace in small chunks that are used again.
class Recording {
 public:
  Recording() : file_(folder_.path() / "trace"), writer_(file_, 1, {.event_bytes = 16 << 10, .chunk_bytes = 4 << 10}) {
    writer_.header().devices[0].total_bytes = 1_GiB;
    step_ = writer_.intern(std::string_view("Optimizer.step#SGD.step"));
  }
  void publish() { writer_.publish(); }
  const std::filesystem::path& file() const { return file_; }

  void write(EventKind kind, int64_t bytes = 0) {
    Event event{.address = 512, .bytes = bytes, .kind = kind};
    if (kind == EventKind::scope_end) event.detail = step_;
    writer_.write(event);
  }

 private:
  TestFolder folder_;
  std::filesystem::path file_;
  TraceWriter writer_;
  uint32_t step_ = 0;
};

}  // namespace

TEST_CASE("a tail follows a trace while it is written", "[trace]") {
  Recording recording;
  CHECK(TraceTail::open(recording.file()) == nullptr);  // not published yet
  recording.publish();
  const auto tail = TraceTail::open(recording.file());
  REQUIRE(tail != nullptr);
  CHECK(tail->read_on() == LiveFigures{.total_bytes = 1_GiB});

  recording.write(EventKind::segment_alloc, 20_MiB);
  recording.write(EventKind::alloc, 4_MiB);
  recording.write(EventKind::free_requested, 4_MiB);
  recording.write(EventKind::alloc, 1_MiB);
  recording.write(EventKind::scope_end);
  const LiveFigures& figures = tail->read_on();
  CHECK(figures.step == 2);
  CHECK(figures.allocated_bytes == 1_MiB);
  CHECK(figures.reserved_bytes == 20_MiB);
  CHECK(figures.peak_allocated_bytes == 4_MiB);
  CHECK(figures.free_bytes() == 1_GiB - 20_MiB);
}

TEST_CASE("a tail tells the peaks of the last steps", "[trace]") {
  Recording recording;
  recording.publish();
  const auto tail = TraceTail::open(recording.file());
  REQUIRE(tail != nullptr);
  recording.write(EventKind::alloc, 1_MiB);
  for (int step = 1; step <= 3; ++step) {  // each keeps a MiB
    recording.write(EventKind::alloc, 4_MiB);
    recording.write(EventKind::free_requested, 4_MiB);
    recording.write(EventKind::alloc, 1_MiB);
    recording.write(EventKind::scope_end);
  }
  CHECK(tail->read_on().step_peaks == std::vector<int64_t>{5_MiB, 6_MiB, 7_MiB});
  for (int step = 0; step < 40; ++step) recording.write(EventKind::scope_end);
  CHECK(tail->read_on().step_peaks == std::vector<int64_t>(LiveFigures::kMostStepPeaks, 4_MiB));
}

TEST_CASE("a tail reads every event once, also where chunks are used again", "[trace]") {
  Recording recording;
  recording.publish();
  const auto tail = TraceTail::open(recording.file());
  REQUIRE(tail != nullptr);
  for (int i = 1; i <= 1000; ++i) {
    recording.write(EventKind::alloc, 1_KiB);
    if (i % 20 == 0) CHECK(tail->read_on().allocated_bytes == i * 1_KiB);
  }
}

TEST_CASE("a tail looks at each name once, however many scopes end", "[trace]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1, {.event_bytes = 64 << 20});
  for (int i = 0; i < 100'000; ++i) writer.intern("name " + std::to_string(i));
  const uint32_t step = writer.intern(std::string_view("Optimizer.step#SGD.step"));
  writer.publish();
  for (int i = 0; i < 20'000; ++i) {
    Event event{.detail = step, .kind = EventKind::scope_end};
    writer.write(event);
  }
  const auto tail = TraceTail::open(folder.path() / "trace");
  REQUIRE(tail != nullptr);
  CHECK(tail->read_on().step == 20'000);  // 2 ∙ 10⁹ names else: ten seconds
}

TEST_CASE("what is no trace has no tail", "[trace]") {
  const TestFolder folder;
  CHECK(TraceTail::open(folder.path() / "absent") == nullptr);
  CHECK(TraceTail::open(folder.write("short")) == nullptr);
  CHECK(TraceTail::open(folder.path()) == nullptr);
}

}  // namespace oomdiag
