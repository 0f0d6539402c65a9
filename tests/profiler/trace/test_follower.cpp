#include <cstddef>
#include <fstream>

#include "profiler/trace/follower.h"
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

TEST_CASE("the figures of a trace are followed while it is written", "[trace]") {
  Recording recording;
  CHECK(TraceFollower::open(recording.file()) == nullptr);  // not published yet
  recording.publish();
  const auto follower = TraceFollower::open(recording.file());
  REQUIRE(follower != nullptr);
  CHECK(follower->read_on() == LiveFigures{.total_bytes = 1_GiB});

  recording.write(EventKind::segment_alloc, 20_MiB);
  recording.write(EventKind::alloc, 4_MiB);
  recording.write(EventKind::free_requested, 4_MiB);
  recording.write(EventKind::alloc, 1_MiB);
  recording.write(EventKind::scope_end);
  const LiveFigures& figures = follower->read_on();
  CHECK(figures.step == 2);
  CHECK(figures.allocated_bytes == 1_MiB);
  CHECK(figures.reserved_bytes == 20_MiB);
  CHECK(figures.peak_allocated_bytes == 4_MiB);
  CHECK(figures.free_bytes() == 1_GiB - 20_MiB);
}

TEST_CASE("a follower gives the peaks of the last steps", "[trace]") {
  Recording recording;
  recording.publish();
  const auto follower = TraceFollower::open(recording.file());
  REQUIRE(follower != nullptr);
  recording.write(EventKind::alloc, 1_MiB);
  for (int step = 1; step <= 3; ++step) {  // each keeps a MiB
    recording.write(EventKind::alloc, 4_MiB);
    recording.write(EventKind::free_requested, 4_MiB);
    recording.write(EventKind::alloc, 1_MiB);
    recording.write(EventKind::scope_end);
  }
  CHECK(follower->read_on().step_peaks == std::vector<int64_t>{5_MiB, 6_MiB, 7_MiB});
  for (int step = 0; step < 40; ++step) recording.write(EventKind::scope_end);
  CHECK(follower->read_on().step_peaks == std::vector<int64_t>(LiveFigures::kMaxStepPeaks, 4_MiB));
}

TEST_CASE("a follower reads every event once, also where chunks are used again", "[trace]") {
  Recording recording;
  recording.publish();
  const auto follower = TraceFollower::open(recording.file());
  REQUIRE(follower != nullptr);
  for (int i = 1; i <= 1000; ++i) {
    recording.write(EventKind::alloc, 1_KiB);
    if (i % 20 == 0) CHECK(follower->read_on().allocated_bytes == i * 1_KiB);
  }
}

TEST_CASE("a follower looks at each name once, however many scopes end", "[trace]") {
  const TestFolder folder;
  TraceWriter writer(folder.path() / "trace", 1, {.event_bytes = 64 << 20});
  for (int i = 0; i < 100'000; ++i) writer.intern("name " + std::to_string(i));
  const uint32_t step = writer.intern(std::string_view("Optimizer.step#SGD.step"));
  writer.publish();
  for (int i = 0; i < 20'000; ++i) {
    Event event{.detail = step, .kind = EventKind::scope_end};
    writer.write(event);
  }
  const auto follower = TraceFollower::open(folder.path() / "trace");
  REQUIRE(follower != nullptr);
  CHECK(follower->read_on().step == 20'000);  // 2 ∙ 10⁹ names else: ten seconds
}

TEST_CASE("a trace that is cut off or damaged while it is followed does no harm", "[trace]") {
  Recording recording;
  recording.publish();
  const auto follower = TraceFollower::open(recording.file());
  REQUIRE(follower != nullptr);
  recording.write(EventKind::alloc, 1_MiB);
  CHECK(follower->read_on().allocated_bytes == 1_MiB);
  const std::filesystem::path copy = recording.file().string() + "-copy";
  std::filesystem::copy_file(recording.file(), copy);
  const auto of_copy = TraceFollower::open(copy);
  REQUIRE(of_copy != nullptr);
  std::filesystem::resize_file(copy, 4096);  // a mapping of it would be a SIGBUS
  CHECK(of_copy->read_on().allocated_bytes == 0);
  std::filesystem::resize_file(copy, 0);
  CHECK(of_copy->read_on().allocated_bytes == 0);
  CHECK(TraceFollower::open(copy) == nullptr);
}

TEST_CASE("a header that makes no sense is not followed", "[trace]") {
  Recording recording;
  recording.publish();
  const auto damage = [&](size_t field, uint64_t value) {
    const std::filesystem::path copy = recording.file().string() + "-copy" + std::to_string(field);
    std::filesystem::copy_file(recording.file(), copy);
    std::fstream file(copy, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(field));
    file.write(reinterpret_cast<const char*>(&value), sizeof value);
    file.close();
    return TraceFollower::open(copy);
  };
  CHECK(damage(offsetof(TraceHeader, chunks_offset), ~uint64_t{0} - 8) == nullptr);
  CHECK(damage(offsetof(TraceHeader, chunk_bytes), 32) == nullptr);
  CHECK(damage(offsetof(TraceHeader, names_offset), ~uint64_t{0} - 8) == nullptr);
}

TEST_CASE("what is no trace cannot be followed", "[trace]") {
  const TestFolder folder;
  CHECK(TraceFollower::open(folder.path() / "absent") == nullptr);
  CHECK(TraceFollower::open(folder.write("short")) == nullptr);
  CHECK(TraceFollower::open(folder.path()) == nullptr);
}

}  // namespace oomdiag
