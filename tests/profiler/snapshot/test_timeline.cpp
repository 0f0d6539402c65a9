#include <zlib.h>

#include "cli/reports/timeline_text.h"
#include "profiler/error.h"
#include "profiler/snapshot/format.h"
#include "profiler/snapshot/timeline.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

// That files of the real torch.profiler are read so is tested in tests/integration/test_export.py.

using namespace oomdiag;

namespace {

MemoryTimeline read(const std::string& text) {
  const TestFolder folder;
  return read_timeline(folder.write("timeline.json", text));
}

/// The error it is rejected with.
std::string error_of_file(const std::filesystem::path& file) {
  try {
    read_timeline(file);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::input);
    CHECK(!error.hint().empty());
    return error.what();
  }
  return "";
}
std::string error_of(const std::string& text) {
  const TestFolder folder;
  return error_of_file(folder.write("timeline.json", text));
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

std::string memory_event(double time_us, int type, int gpu, int allocated, int reserved) {
  return R"({"ph": "i", "name": "[memory]", "ts": )" + std::to_string(time_us) + R"(, "args": {"Total Reserved": )" +
         std::to_string(reserved) + R"(, "Total Allocated": )" + std::to_string(allocated) + R"(, "Device Id": )" +
         std::to_string(gpu) + R"(, "Device Type": )" + std::to_string(type) + "}}";
}
std::string chrome_trace(const std::string& events) {
  return R"({"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "[memory]"}], "traceEvents": [)" + events +
         "]}";
}

const std::string kRaw =
    "[[-1, 1, 100, 0], [-1, 1, 20, 1], [5000, 4, -20, 1], [7500, 2, 64, 4], [9000, 3, -64, 4], [9000, 3, 64, 5], "
    "[9500, 4, -100, 0]]";

}  // namespace

TEST_CASE("a Chrome trace: peaks, reserved and times of each GPU; the host's memory is none", "[timeline]") {
  const MemoryTimeline timeline = read(chrome_trace(
      memory_event(10.5, 1, 0, 512, 2048) + "," + memory_event(11, 0, -1, 9999, 9999) + "," +
      R"({"name": "aten::add", "ts": 1, "args": {"Total Allocated": 77777, "Device Type": 1, "Device Id": 0}},)" +
      memory_event(20, 1, 3, 4096, 4096) + "," + memory_event(30, 1, 0, 1536, 2048) + "," +
      memory_event(40, 1, 0, 1024, 1024)));
  CHECK(timeline.kind == MemoryTimeline::Kind::chrome);
  REQUIRE(timeline.gpus.size() == 2);
  const TimelineOfGpu first{.changes = 3,
                            .begin_us = 10.5,
                            .end_us = 40,
                            .peak_us = 30,
                            .peak_bytes = 1536,
                            .end_bytes = 1024,
                            .peak_reserved_bytes = 2048};
  CHECK(timeline.gpus.at(0) == first);
  CHECK(timeline.gpus.at(3).peak_bytes == 4096);
  const std::string words = to_text(timeline, false);
  CHECK(contains(words, "peak 4.00 KiB on GPU 3, 0.00 ms into the profile"));
  CHECK(contains(words, "_dump_snapshot"));
}

TEST_CASE("events that are not in order: the end is what comes last", "[timeline]") {
  const MemoryTimeline timeline =
      read(chrome_trace(memory_event(30, 1, 0, 300, 0) + "," + memory_event(10, 1, 0, 100, 0)));
  CHECK(timeline.gpus.at(0).begin_us == 10);
  CHECK(timeline.gpus.at(0).end_bytes == 300);
}

TEST_CASE("a timeline of sizes: the peak is the largest sum, by category", "[timeline]") {
  // As many times as a raw event has numbers.
  const MemoryTimeline timeline = read(
      "[[10, 10, 12, 15], [[0, 64, 0, 0, 0, 0, 0, 0, 0], [0, 64, 32, 0, 0, 8, 0, 0, 1], [0, 64, 0, 0, 0, 0, 40, 0, 0], "
      "[0, 64, 0, 0, 0, 0, 0, 0, 2]]]");
  CHECK(timeline.kind == MemoryTimeline::Kind::sizes);
  const TimelineOfGpu gpu{.changes = 4,
                          .begin_us = 10,
                          .end_us = 15,
                          .peak_us = 10,
                          .peak_bytes = 105,
                          .end_bytes = 66,
                          .peak = {64, 32, 0, 0, 8, 0, 0, 1}};
  CHECK(timeline.gpus.at(0) == gpu);
  CHECK(contains(to_text(timeline, false), "parameters                     64  ############"));
}

TEST_CASE("a raw timeline: what was there before counts from the first time on", "[timeline]") {
  const MemoryTimeline timeline = read(kRaw);
  CHECK(timeline.kind == MemoryTimeline::Kind::raw);
  const TimelineOfGpu& gpu = timeline.gpus.at(0);
  CHECK(gpu.begin_us == 5);
  CHECK(gpu.peak_us == 7.5);
  CHECK(gpu.peak_bytes == 164);
  CHECK(gpu.peak == std::array<int64_t, 8>{100, 0, 0, 0, 64, 0, 0, 0});
  CHECK(gpu.end_us == 9.5);
  CHECK(gpu.end_bytes == 64);
  CHECK(read("[[-1, 1, 100, 0]]").gpus.at(0).peak_bytes == 100);
  CHECK(read("[[5000, 4, -20, 1]]").gpus.at(0).peak_bytes == 0);
}

TEST_CASE("a packed timeline is read like any", "[timeline]") {
  const TestFolder folder;
  const std::string file = folder.path() / "raw.json.gz";
  const gzFile packed = gzopen(file.c_str(), "wb");
  gzwrite(packed, kRaw.data(), static_cast<unsigned>(kRaw.size()));
  gzclose(packed);
  CHECK(is_timeline(file));
  CHECK(read_timeline(file).gpus == read(kRaw).gpus);

  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 12);
  CHECK(contains(error_of_file(file), "is a JSON list that is damaged or cut off"));
}

TEST_CASE("what is no timeline is rejected with the format that it has", "[timeline]") {
  const std::string chrome = chrome_trace(memory_event(1, 1, 0, 1, 1));
  CHECK(contains(error_of(chrome.substr(0, chrome.size() - 3)), "is a Chrome trace that is damaged or cut off"));
  CHECK(contains(error_of(chrome_trace("")), R"(is a Chrome trace without "[memory]" events of a GPU)"));
  CHECK(contains(error_of(chrome_trace(memory_event(1, 0, -1, 1, 1))), "without \"[memory]\" events of a GPU"));
  CHECK(contains(error_of(kRaw.substr(0, 40)), "is a JSON list that is damaged or cut off"));
  CHECK(contains(error_of("[[], []]"), "a memory timeline without an allocation"));
  CHECK(contains(error_of("[[1, 2], [[0, 5]]]"), "times and sizes differ in number"));
  for (const char* const other :
       {"[1, 2, 3]", R"([{"name": "[memory]"}])", R"(["a"])", "[[1, 2, 3], [1, 2, 3]]", "[[[1]]]",
        "[[1, 2], [[0, 5], [0, 5], [0, 5]]]", "[[1], [[0, 5]], [[0, 5]]]", "[[1], [[[0, 5]]]]"}) {
    INFO(other);
    CHECK(contains(error_of(other), "is a JSON list, but not of rows as"));
  }
  CHECK(contains(error_of("[[1, 2, 3, 4], [" + std::string(1000, '1') + "]]"), "damaged"));
}

TEST_CASE("a file is known by its beginning as what it is", "[timeline]") {
  const TestFolder folder;
  CHECK(find_format(folder.write("a", chrome_trace(""))) == FileFormat::timeline);
  CHECK(find_format(folder.write("a", R"({"deviceProperties": [)" + std::string(5000, ' '))) == FileFormat::timeline);
  CHECK(find_format(folder.write("a", "\n " + kRaw)) == FileFormat::timeline);
  CHECK(find_format(folder.write("a", R"({"schema": "oomdiag-report/1"})")) == FileFormat::report);
  CHECK_FALSE(is_timeline(folder.write("a", "\x1f\x8b no gzip")));
}
