#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>

#include "profiler/explain/findings.h"
#include "profiler/explain/words/shape.h"
#include "profiler/replay/history.h"
#include "profiler/report/json/json.h"
#include "profiler/report/make/gpu_report.h"
#include "profiler/report/make/make_report.h"
#include "profiler/report/text/text.h"
#include "profiler/trace/trace.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

bool mentions(const std::vector<std::string>& lines, std::string_view what) {
  return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) { return line.find(what) != line.npos; });
}

}  // namespace

TEST_CASE("a report adds up: categories to the allocated bytes, the GPU to its total", "[report]") {
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    const ReportOfDevice device = make_report(trace, {}).devices.at(0);
    const ReportMemory& gpu = device.memory;
    int64_t sum = 0;
    for (const auto& [name, bytes] : device.categories) sum += bytes;

    CHECK(sum == gpu.allocated_bytes);
    CHECK(gpu.allocated_bytes + gpu.pending_free_bytes + gpu.cached_bytes + gpu.non_pytorch_bytes + gpu.free_bytes ==
          device.device.total_bytes);
    CHECK(std::accumulate(device.saved_tensors.begin(), device.saved_tensors.end(), int64_t{0},
                          [](int64_t so_far, const ReportSavedTensor& saved) { return so_far + saved.bytes; }) ==
          device.categories.at(4).second);
    CHECK(std::count_if(device.timeline.begin(), device.timeline.end(), [&](const ReportPoint& point) {
            return point.allocated_bytes == device.peak.allocated_bytes;
          }) >= 1);
  }
}

TEST_CASE("the failing allocation is described where it happened", "[report]") {
  const Report report = make_report(oom_in_backward(), {.exit_code = 1});
  const ReportOfDevice& device = report.devices.at(0);

  CHECK(report.outcome == "out_of_memory");
  REQUIRE(device.failure);
  CHECK(*device.failure == ReportFailure{.phase = Phase::backward,
                                         .step = 1,
                                         .node = "ReluBackward0",
                                         .op = "aten::relu",
                                         .module = "relu1",
                                         .source = "train.py:11",
                                         .inner_op = "aten::threshold_backward",
                                         .requested_bytes = 64_MiB,
                                         .allocated_bytes = 196_MiB + 512,
                                         .reserved_bytes = 214_MiB,
                                         .free_bytes = 42_MiB,
                                         .time_ns = device.failure->time_ns,
                                         .requested_for = "gradient of conv1, [64, 32, 64, 128] float32"});
  REQUIRE(device.saved_tensors.size() == 1);
  CHECK(device.saved_tensors[0] == ReportSavedTensor{.bytes = 64_MiB,
                                                     .shape = {64, 32, 64, 128},
                                                     .dtype = "float32",
                                                     .made_by = "aten::relu",
                                                     .module = "relu1",
                                                     .source = "train.py:11",
                                                     .saved_by = {"ReluBackward0", "MeanBackward0"},
                                                     .saved_by_modules = {"relu1", ""}});
}

TEST_CASE("the outcome follows from the exit status, and from the trace where there is none", "[report]") {
  const Trace fits = training_that_fits();
  Trace killed = fits;
  killed.process.end_state = EndState::running;

  CHECK(make_report(fits, {.exit_code = 0}).outcome == "ok");
  CHECK(make_report(fits, {.exit_code = 1}).outcome == "failed");
  CHECK(make_report(fits, {.exit_code = 137}).outcome == "killed");
  CHECK(make_report(fits, {.signal = 9}).outcome == "killed");
  CHECK(make_report(fits, {.signal = 9}).exit_code == 137);
  CHECK(make_report(fits, {}).outcome == "ok");
  CHECK(make_report(killed, {}).outcome == "killed");
  CHECK(make_report(oom_in_forward(), {}).outcome == "out_of_memory");
  CHECK(make_report(oom_in_forward(), {.signal = 6}).outcome == "out_of_memory");
  CHECK(make_report(oom_in_forward(), {.exit_code = 0}).outcome == "caught");
  Trace left_at_once = oom_in_forward();
  left_at_once.process.end_state = EndState::running;  // by os._exit(0), or os.exec…
  CHECK(make_report(left_at_once, {.exit_code = 0}).outcome == "caught");
}

TEST_CASE("OOMs that did not end the program are listed", "[report]") {
  EventBuilder trace({.gpu_bytes = 40_MiB});
  trace.op({.op = "aten::conv2d", .module = "conv"}).alloc("y", 4_MiB).nodes(0);
  trace.oom(100_MiB, false).oom(100_MiB, false).alloc("w", 1_MiB).free("w");
  trace.op({.op = "aten::empty"}).oom(200_MiB).op_failed().op({.op = "aten::relu"}).nodes(1);

  const ReportOfDevice device = make_report(trace, {.exit_code = 0}).devices.at(0);
  CHECK_FALSE(device.failure);
  REQUIRE(device.recovered_by_library.size() == 1);
  CHECK(device.recovered_by_library[0] == ReportRecovered{"aten::conv2d", 100_MiB, 2, 1_MiB, ""});
  REQUIRE(device.caught.size() == 1);
  CHECK(device.caught[0].op == "aten::empty");
}

TEST_CASE("a program that still runs has not ended without a word", "[report]") {
  Trace trace = training_that_fits();
  trace.process.end_state = EndState::running;
  const Report report = make_report(trace, {.still_runs = true});
  CHECK(report.outcome == "ok");
  CHECK(report.still_runs);
  const std::string words = to_text(report);
  CAPTURE(words);
  CHECK(words.starts_with("oomdiag: still runs, step 3"));
  CHECK(to_text(make_report(trace, {})).starts_with("oomdiag: ended without a message, step 3"));
}

TEST_CASE("the GPU that failed comes first, else the fullest", "[report]") {
  EventBuilder trace({.gpu_bytes = 64_MiB});
  trace.op({.op = "aten::relu"}).alloc("a", 30_MiB).nodes(0).device(1).alloc("b", 4_MiB);
  CHECK(make_report(trace, {}).main_device == 0);

  trace.op({.op = "aten::relu"}).oom(60_MiB).op_failed();
  CHECK(make_report(trace, {}).main_device == 1);
}

TEST_CASE("a report says what it does not know", "[report]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"})
      .alloc("y", 4_MiB)
      .nodes(0)
      .note("unsupported", "cublasFoo")
      .note("unsupported", "cublasFoo");
  Trace damaged = trace;
  damaged.dropped_events = 3;
  damaged.overwritten_events = 5;
  damaged.dropped_blocks = 2;
  damaged.dropped_names = 4;
  damaged.dropped_driver = 5;
  damaged.deep_calls = 6;
  damaged.folded_names = 7;
  damaged.unnumbered_threads = 8;
  damaged.process.virtual_device = false;
  damaged.process.recorder_failure = "no space";

  const auto limitations = make_report(damaged, {.limitations = {"from the caller"}}).limitations;
  CHECK(mentions(limitations, "3 events were lost"));
  CHECK(mentions(limitations, "oldest 5 events"));
  CHECK(mentions(limitations, "2 live blocks"));
  CHECK(mentions(limitations, "4 names or places did not fit"));
  CHECK(mentions(limitations, "5 allocations by libraries outside of PyTorch"));
  CHECK(mentions(limitations, "6 ops ran too deep"));
  CHECK(mentions(limitations, "7 scopes and marks that differ by numbers only"));
  CHECK(mentions(limitations, "8 threads began after 65,534 others"));
  CHECK(mentions(limitations, "recording stopped before the end: no space"));
  CHECK(mentions(limitations, "reserved bytes are a lower bound"));
  CHECK(mentions(limitations, "non-PyTorch memory is not known"));
  CHECK(mentions(limitations, "from the caller"));
  CHECK(mentions(limitations, "not in the virtual device, so that what it takes is missing: 1 function of cuBLAS"));
  CHECK(mentions(make_report(trace, {}).limitations, "the GPU is virtual"));
}

TEST_CASE("an abort while Python ends is PyTorch's own, and the program had done its work", "[report]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(0);
  Trace ended = trace;
  ended.process.python_ended = true;
  const std::string_view sentence = "the program had done its work";
  CHECK(mentions(make_report(ended, {.exit_code = 134, .signal = 6}).limitations, sentence));
  CHECK_FALSE(mentions(make_report(ended, {.exit_code = 139, .signal = 11}).limitations, sentence));
  CHECK_FALSE(mentions(make_report(trace, {.exit_code = 134, .signal = 6}).limitations, sentence));
}

TEST_CASE("bytes of others on the GPU are what is neither free nor reserved", "[report]") {
  EventBuilder trace({.gpu_bytes = 100_MiB});
  trace.op({.op = "aten::relu"}).alloc("y", 30_MiB).nodes(0).stats();
  trace.trace().events.in_memory().back().address -= 7_MiB;

  const ReportMemory memory = make_report(trace, {}).devices.at(0).memory;
  CHECK(memory.non_pytorch_bytes == 7_MiB);
  CHECK(memory.free_bytes == 63_MiB);
}

TEST_CASE("a modelled context counts where nobody asked the GPU", "[report]") {
  EventBuilder trace({.gpu_bytes = 100_MiB});
  trace.op({.op = "aten::relu"}).alloc("y", 30_MiB).nodes(0);
  trace.trace().devices[0].context_bytes = 11_MiB;

  CHECK(make_report(trace, {}).devices.at(0).memory.non_pytorch_bytes == 11_MiB);
}

TEST_CASE("shapes are read as far as they can be", "[report]") {
  CHECK(parse_shape("[64, 3] float32") == std::vector<int64_t>{64, 3});
  CHECK(parse_shape("[] int64").empty());
  CHECK(parse_shape("64, 3").empty());
  CHECK(parse_shape("[12").empty());
  CHECK(parse_shape("[99999999999999999999, 2]") == std::vector<int64_t>{2});
  CHECK(parse_dtype("[64, 3] float32") == "float32");
  CHECK(parse_dtype("[64, 3]").empty());
}

namespace {

/// Replaces fields of some events by what a damaged file might hold.
void damage(Trace& trace, std::mt19937_64& random) {
  const uint64_t odd[] = {0, 1, 511, 512, 4096, uint64_t{1} << 50, uint64_t{1} << 63, ~uint64_t{0}, kNoNode, random()};
  const auto value = [&] { return odd[random() % std::size(odd)]; };
  for (int i = 0; i < 20; ++i) {
    Event& event = trace.events.in_memory()[random() % trace.events.size()];
    const Event other = trace.events[random() % trace.events.size()];
    switch (random() % 10) {
      case 0:
        event.address = value();
        break;
      case 1:
        event.bytes = static_cast<int64_t>(value());
        break;
      case 2:
        event.detail = value();
        break;
      case 3:
        event.node_sequence = value();
        break;
      case 4:
        event.context = static_cast<uint32_t>(value());
        break;
      case 5:
        event.call_id = static_cast<uint32_t>(value());
        break;
      case 6:
        event.kind = static_cast<EventKind>(random() % (static_cast<uint64_t>(kLastEventKind) + 1));
        break;
      case 7:
        event.device = static_cast<uint8_t>(random() % 18);
        break;
      case 8:
        event.address = other.address;
        break;
      default:
        event = other;
    }
  }
}

}  // namespace

TEST_CASE("a damaged trace makes a report that adds up, not a crash", "[report][property]") {
  std::mt19937_64 random(1);
  const Trace whole[] = {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()};
  for (int i = 0; i < 400; ++i) {
    Trace trace = whole[i % 4];
    damage(trace, random);
    const Report report = make_report(trace, {.batch = 64});
    CHECK(from_json(to_json(report)) == report);
    CHECK(!to_text(report).empty());
    for (const ReportOfDevice& device : report.devices) {
      int64_t sum = 0;
      for (const auto& [name, bytes] : device.categories) sum += bytes;
      CHECK(sum == device.memory.allocated_bytes);
      const ReportMemory& gpu = device.memory;
      CHECK(gpu.allocated_bytes + gpu.pending_free_bytes + gpu.cached_bytes + gpu.non_pytorch_bytes + gpu.free_bytes ==
            device.device.total_bytes);
    }
  }
}

TEST_CASE("parameter groups are listed where there are several, and add up to their categories", "[report]") {
  EventBuilder trace;
  trace.op({.op = "aten::to"}).alloc("w0", 4_MiB).alloc("w1", 8_MiB).alloc("frozen", 2_MiB);
  for (const char* name : {"w0", "w1", "frozen"}) trace.names(EventKind::parameter, name, name);
  trace.op({.op = "aten::relu"}).alloc("y", 1_MiB).nodes(0).begin_scope("Optimizer.step#SGD.step");
  trace.op({.op = "aten::zeros_like", .scope = "Optimizer.step#SGD.step", .grad = false}).alloc("m1", 8_MiB).no_op();
  trace.end_scope("Optimizer.step#SGD.step").names(EventKind::grouped, "w0", "", "SGD, group 0");
  CHECK(make_report(trace, {}).devices.at(0).parameter_groups.empty());

  trace.names(EventKind::grouped, "w1", "", "SGD, group 1").names(EventKind::grouped, "m1", "", "SGD, group 1");
  const Report report = make_report(trace, {});
  CHECK(report.devices.at(0).parameter_groups ==
        std::vector<ReportParameterGroup>{{"SGD, group 1", 8_MiB, 0, 8_MiB}, {"SGD, group 0", 4_MiB}, {"", 2_MiB}});
  CHECK(to_text(report, {.all = true}).find("by parameter group, MiB") != std::string::npos);
}

TEST_CASE("what others take after PyTorch gave memory back is not in host memory", "[report]") {
  Trace trace;
  trace.devices = {{.name = "NVIDIA GeForce RTX 4090", .total_bytes = 24_GiB}};
  DeviceHistory device;
  device.peak.reserved_bytes = 20_GiB;
  device.state.reserved_bytes = 2_GiB;
  device.state.non_pytorch = {{"libnccl.so.2", "device", 8_GiB}, {"unexplained", "", 0}};
  const auto host_memory_of = [&] { return report_device(trace, device, {}).peak.host_memory_bytes; };
  CHECK(host_memory_of() == 0);
  device.state.reserved_bytes = 20_GiB;  // at once
  CHECK(host_memory_of() == 4_GiB);
  device.state.non_pytorch.front().kind = "process";  // which may have gone
  CHECK(host_memory_of() == 0);
  device.peak.reserved_bytes = 25_GiB;
  CHECK(host_memory_of() == 1_GiB);
  device.state.host_memory = {{"rmm.so", "managed", 1_GiB}};
  CHECK(host_memory_of() == 0);
}

}  // namespace oomdiag
