#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "profiler/error.h"
#include "profiler/replay/replay.h"
#include "profiler/report/make/make_report.h"
#include "profiler/report/text/text.h"
#include "profiler/trace/writer.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

// Long runs under a small budget: what the report must still know when nearly every event is overwritten.

using namespace oomdiag;

namespace {

constexpr int64_t kBytes = 1 << 20;
constexpr uint64_t kWeight = 1 << 30, kLeaked = uint64_t{1} << 40;

/// A training loop as the recorder would write it: a weight, three activations a step, and a block of 512 bytes that is
/// never freed in every `leaks_every`th step.
class LongRun {
 public:
  LongRun(const std::filesystem::path& file, bool optimizer, const TraceBudget& budget)
      : writer_(file, 1, budget), optimizer_(optimizer) {
    writer_.header().devices[0].total_bytes = int64_t{1} << 36;
    scope_ = writer_.intern(std::string_view("Optimizer.step#SGD.step"));
    forward_ = writer_.intern(Context{.op = writer_.intern(std::string_view("aten::linear")), .flags = kGradMode});
    backward_ = writer_.intern(Context{.node = writer_.intern(std::string_view("AddmmBackward0"))});
    named_ = writer_.intern(Context{.module = writer_.intern(std::string_view("fc.weight"))});
    if (optimizer) writer_.count_steps_by_optimizer();
    alloc(kWeight, 4 * kBytes, 0);
    Event name{.address = kWeight, .bytes = 4 * kBytes, .context = named_, .kind = EventKind::parameter};
    writer_.write_and_keep(name);
  }

  void run(uint32_t steps, uint32_t leaks_every) {
    for (uint32_t step = 1; step <= steps; ++step) {
      const uint64_t before = writer_.header().last_sequence.load();
      if (!optimizer_ && step > 1) writer_.end_step(before);
      for (uint64_t i = 1; i <= 3; ++i) alloc(kWeight + i * 64 * kBytes, kBytes, forward_);
      write({.bytes = 1, .node_sequence = 3 * step, .context = forward_, .kind = EventKind::nodes_created});
      if (step % leaks_every == 0) alloc(kLeaked + step * 512, 512, forward_);
      alloc(kWeight + 8 * 64 * kBytes, kBytes, backward_, 3 * step);
      for (uint64_t i = 1; i <= 3; ++i) free(kWeight + i * 64 * kBytes, kBytes);
      free(kWeight + 8 * 64 * kBytes, kBytes);
      if (!optimizer_) continue;
      write({.detail = scope_, .kind = EventKind::scope_begin});
      if (step == steps) return;  // the last one runs out of memory inside
      write({.detail = scope_, .kind = EventKind::scope_end});
      writer_.end_step(writer_.header().last_sequence.load());
    }
  }

  void oom() {
    write({.address = 4096, .bytes = int64_t{1} << 30, .kind = EventKind::out_of_memory});
    writer_.publish();
  }
  /// As the exception leaves the program everything is freed.
  void unwind(uint32_t steps, uint32_t leaks_every) {
    for (uint32_t step = leaks_every; step <= steps; step += leaks_every) free(kLeaked + step * 512, 512);
    free(kWeight, 4 * kBytes);
  }

 private:
  uint64_t write(Event event) {
    event.thread = event.node_thread = 1;
    if (event.call_id == 0) event.call_id = ++serial_;
    return writer_.write(event);
  }
  void alloc(uint64_t address, int64_t bytes, uint32_t context, uint64_t node = kNoNode) {
    Event event{
        .address = address, .bytes = bytes, .node_sequence = node, .context = context, .kind = EventKind::alloc};
    event.sequence = write(event);
    writer_.add_block(event);
  }
  void free(uint64_t address, int64_t bytes) {
    const uint64_t sequence =
        write({.address = address, .bytes = bytes, .kind = EventKind::free_requested, .flags = kFreeCompleted});
    writer_.remove_block(0, address, sequence);
  }

  TraceWriter writer_;
  bool optimizer_;
  uint32_t scope_ = 0, forward_ = 0, backward_ = 0, named_ = 0;
  uint32_t serial_ = 0;
};

const TraceBudget kSmall{.event_bytes = 1 << 20, .chunk_bytes = 1 << 16, .slots_per_device = 1 << 12};

}  // namespace

TEST_CASE("after 100 000 steps in a small trace an OOM still has its step, and each live block the step that made it",
          "[trace][bounded]") {
  const bool optimizer = GENERATE(true, false);
  const bool unwinds = GENERATE(true, false);
  const TestFolder folder;
  const std::filesystem::path file = folder.path() / "trace";
  {
    LongRun run(file, optimizer, kSmall);
    run.run(100'000, 1000);
    run.oom();
    if (unwinds) run.unwind(100'000, 1000);
  }
  const Trace trace = read_trace(file);
  REQUIRE(trace.overwritten_events > 800'000);
  REQUIRE(trace.step_stride == 1);
  const History history = replay(trace);
  REQUIRE(history.devices.size() == 1);
  const DeviceHistory& gpu = history.devices[0];

  CHECK(history.steps == 100'000);
  REQUIRE(gpu.failure.has_value());
  CHECK(gpu.failure->step == 100'000);
  REQUIRE(gpu.state.blocks.size() == 101);
  for (const LiveBlock& block : gpu.state.blocks) {
    if (block.address == kWeight) {
      CHECK(block.category == Category::parameter);
      CHECK(block.name == "fc.weight");
    } else {
      CHECK(block.step == (block.address - kLeaked) / 512);
      CHECK(block.made.op == "aten::linear");
    }
  }
  REQUIRE(gpu.step_ends.size() > 100);
  for (size_t i = 0; i < gpu.step_ends.size(); ++i) {
    const StepEnd& end = gpu.step_ends[i];
    if (i > 0) CHECK(end.step == gpu.step_ends[i - 1].step + 1);
    CHECK(end.allocated_bytes == 4 * kBytes + end.step / 1000 * 512);
  }
  CHECK(gpu.step_ends.back().step == 99'999);
}

TEST_CASE("a list of steps that is full keeps every second one, and the steps stay right to within two",
          "[trace][bounded]") {
  const TestFolder folder;
  const std::filesystem::path file = folder.path() / "trace";
  {
    TraceBudget budget = kSmall;
    budget.steps = 700;
    LongRun run(file, true, budget);
    run.run(1000, 100);
    run.oom();
  }
  const Trace trace = read_trace(file);
  CHECK(trace.step_stride == 2);
  CHECK(trace.step_ends.size() == 500);
  const History history = replay(trace);
  REQUIRE(history.devices.size() == 1);
  CHECK(history.steps >= 999);
  CHECK(history.steps <= 1000);
  for (const LiveBlock& block : history.devices[0].state.blocks) {
    if (block.address == kWeight) continue;
    const auto made_in = static_cast<int64_t>((block.address - kLeaked) / 512);
    CHECK(std::abs(static_cast<int64_t>(block.step) - made_in) <= 1);
  }
}

TEST_CASE("a whole trace and the same trace overwritten show the same steps", "[trace][bounded]") {
  const bool optimizer = GENERATE(true, false);
  const TestFolder folder;
  for (const bool small : {true, false}) {
    TraceBudget budget = kSmall;
    if (!small) budget.event_bytes = 64 << 20;
    LongRun run(folder.path() / (small ? "small" : "whole"), optimizer, budget);
    run.run(3000, 100);
    run.oom();
  }
  const Trace small = read_trace(folder.path() / "small"), whole = read_trace(folder.path() / "whole");
  REQUIRE(small.overwritten_events > 0);
  REQUIRE(whole.overwritten_events == 0);
  const History cut = replay(small), full = replay(whole);
  CHECK(cut.steps == full.steps);
  CHECK(cut.devices.at(0).failure->step == full.devices.at(0).failure->step);
  const auto& actual = cut.devices[0].state.blocks;
  const auto& expected = full.devices[0].state.blocks;
  REQUIRE(actual.size() == expected.size());
  for (size_t b = 0; b < actual.size(); ++b) CHECK(actual[b].step == expected[b].step);
}

TEST_CASE("a damaged trace of a long run is explained as far as it makes sense, or rejected; never worse",
          "[trace][bounded][fuzz]") {
  const TestFolder folder;
  const std::filesystem::path file = folder.path() / "trace";
  {
    const TraceBudget budget{.event_bytes = 1 << 15,
                             .chunk_bytes = 1 << 12,
                             .names_bytes = 1 << 12,
                             .contexts = 64,
                             .steps = 64,
                             .kept_events = 16,
                             .slots_per_device = 64};
    LongRun run(file, true, budget);
    run.run(1000, 100);
    run.oom();
    run.unwind(1000, 100);
  }
  std::ifstream in(file, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  std::mt19937_64 random(17);
  for (int round = 0; round < 300; ++round) {
    std::string bytes = whole;
    if (round % 4 == 0) bytes.resize(random() % bytes.size());
    for (uint64_t i = random() % 64; i > 0 && bytes.size() > 9; --i) {
      const uint64_t within = round % 2 == 0 ? std::min<uint64_t>(bytes.size(), kHeaderBytes) : bytes.size();
      bytes[8 + random() % (within - 8)] = static_cast<char>(random());
    }
    try {
      to_text(make_report(read_trace(folder.write("damaged", bytes)), {}), {});
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::input);
    }
  }
}

TEST_CASE("a place that came late reaches the live block too, and no other block at its address", "[trace][bounded]") {
  const bool freed_meanwhile = GENERATE(false, true);
  const TestFolder folder;
  const std::filesystem::path file = folder.path() / "trace";
  {
    TraceWriter writer(file, 1, kSmall);
    const uint32_t late = writer.intern(Context{.op = writer.intern(std::string_view("aten::zeros"))});
    const auto alloc = [&](uint64_t address) {
      Event event{.address = address, .bytes = 512, .kind = EventKind::alloc};
      writer.write(event);
      writer.add_block(event);
      return event.sequence;
    };
    const uint64_t surprise = alloc(kLeaked);
    Event* written = writer.last_written();
    if (freed_meanwhile) {
      Event free{.address = kLeaked, .bytes = 512, .kind = EventKind::free_requested, .flags = kFreeCompleted};
      writer.remove_block(0, kLeaked, writer.write(free));
      alloc(kLeaked);
    }
    writer.place(written, surprise, late);
    alloc(kWeight);
    for (int i = 0; i < 40'000; ++i) {  // until these are overwritten
      Event other{.kind = EventKind::device_memory};
      writer.write(other);
    }
    writer.publish();
  }
  const Trace trace = read_trace(file);
  const auto block = std::find_if(trace.initial.begin(), trace.initial.end(),
                                  [](const Event& event) { return event.address == kLeaked; });
  REQUIRE(block != trace.initial.end());
  CHECK(trace.name(trace.context(block->context).op) == (freed_meanwhile ? "" : "aten::zeros"));
}
