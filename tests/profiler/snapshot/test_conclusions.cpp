#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "profiler/report/make/make_report.h"
#include "profiler/report/text/text.h"
#include "profiler/snapshot/snapshot.h"
#include "profiler/snapshot/to_trace.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"
#include "tests/profiler/snapshot/snapshot_writer.h"

// What is concluded from a snapshot alone. That it is what our own trace of the same process says is tested with real
// programs: tests/causes/snapshots.py.

using namespace oomdiag;

namespace {

const std::string kPackages = "/usr/lib/python3/dist-packages/torch/";

Snapshot read(const std::string& bytes) {
  const TestFolder folder;
  return read_snapshot(folder.write("snapshot.pickle", bytes));
}

std::string in_forward(int64_t line) {
  return list({frame("forward", kPackages + "nn/modules/linear.py", 134),
               frame("_call_impl", kPackages + "nn/modules/module.py", 1790),
               frame("train", "/home/me/train.py", line)});
}
std::string in_optimizer() {
  return list({frame("_init_group", kPackages + "optim/adam.py", 180), frame("step", kPackages + "optim/adam.py", 230),
               frame("train", "/home/me/train.py", 40)});
}
const std::string kNoFrames = "]";

std::string annotation(const std::string& name, const std::string& stage, int64_t time_us) {
  return dict({{"stage", text(stage)}, {"name", text(name)}, {"device", integer(0)}, {"time_us", integer(time_us)}});
}

/// Steps of one forward and one backward block; each keeps a MiB that line 12 made. Then a request fails.
std::string leaking(int steps, const std::string& of_oom, bool annotated) {
  std::vector<std::string> entries, annotations, blocks;
  const int64_t large = 64_MiB;
  entries.push_back(entry("segment_alloc", kAddress, large, in_forward(5), 1));
  int64_t time = 10;
  for (int step = 0; step < steps; ++step) {
    const int64_t kept = kAddress + step * 1_MiB, work = kAddress + 40_MiB, gradient = kAddress + 44_MiB;
    entries.push_back(entry("alloc", work, 4_MiB, in_forward(10), ++time));
    entries.push_back(entry("alloc", kept, 1_MiB, list({frame("train", "/home/me/train.py", 12)}), ++time));
    entries.push_back(entry("alloc", gradient, 4_MiB, kNoFrames, ++time));
    entries.push_back(entry("free_requested", work, 4_MiB, kNoFrames, ++time));
    entries.push_back(entry("free_completed", work, 4_MiB, kNoFrames, ++time));
    if (annotated) annotations.push_back(annotation("Optimizer.step#SGD.step", "START", ++time));
    if (annotated) annotations.push_back(annotation("Optimizer.step#SGD.step", "END", ++time));
    entries.push_back(entry("free_requested", gradient, 4_MiB, in_forward(20), ++time));
    entries.push_back(entry("free_completed", gradient, 4_MiB, in_forward(20), ++time));
    blocks.push_back(block(1_MiB, 1_MiB, "active_allocated", list({frame("train", "/home/me/train.py", 12)})));
  }
  entries.push_back(entry("alloc", kAddress + 40_MiB, 4_MiB, in_forward(10), ++time));
  const int64_t left = 40_MiB - steps * 1_MiB;
  blocks.push_back(block(left, 0, "inactive"));
  blocks.push_back(block(4_MiB, 4_MiB, "active_allocated", in_forward(10)));
  blocks.push_back(block(large - 44_MiB, 0, "inactive"));
  entries.push_back(entry("oom", 1_MiB, 60_MiB, of_oom, ++time));
  return snapshot({segment(kAddress, large, blocks)}, entries, annotations);
}

Report report_on(const std::string& bytes, int64_t gpu_bytes = 0) {
  Trace trace = to_trace(read(bytes));
  if (gpu_bytes > 0) trace.devices.at(0) = {.name = "a GPU", .total_bytes = gpu_bytes};
  Report report = make_report(trace, {});
  REQUIRE(report.devices.size() == 1);
  return report;
}

}  // namespace

TEST_CASE("steps are read from annotations, and from what follows a backward pass where there are none", "[snapshot]") {
  for (const bool annotated : {true, false}) {
    const Report report = report_on(leaking(20, kNoFrames, annotated));
    const ReportOfDevice& gpu = report.devices[0];
    REQUIRE(gpu.failure.has_value());
    CHECK(gpu.failure->step == 21);
    REQUIRE(gpu.cause.has_value());
    CHECK(gpu.cause->kind == CauseKind::leak);
    REQUIRE(gpu.growth.size() == 1);
    CHECK(gpu.growth[0].bytes_per_step == 1_MiB);
    CHECK(gpu.growth[0].source == "/home/me/train.py:12");
    CHECK(to_text(report, {}).find("expandable_segments") == std::string::npos);
  }
}

TEST_CASE("a block without a frame whose allocation was not seen is older than the recording", "[snapshot]") {
  const std::string weights = block(8_MiB, 8_MiB, "active_allocated", kNoFrames);
  const std::string seen = entry("alloc", kAddress + 8_MiB, 4_MiB, kNoFrames, 2);
  const Report report = report_on(
      snapshot({segment(kAddress, 20_MiB,
                        {weights, block(4_MiB, 4_MiB, "active_allocated", kNoFrames), block(8_MiB, 0, "inactive")})},
               {entry("segment_alloc", kAddress + 64_MiB, 2_MiB, in_forward(5), 1), seen}));
  std::map<std::string, int64_t> by_place;
  for (const ReportOwner& owner : report.devices[0].allocations) by_place[owner.name] += owner.bytes;
  CHECK(by_place == std::map<std::string, int64_t>{{"older than the recording", 8_MiB}, {"backward", 4_MiB}});
}

TEST_CASE("a request without a Python frame is one of backward, where others have frames", "[snapshot]") {
  const std::string engine = list(
      {frame("at::_ops::mul_Tensor::call(at::Tensor const&, at::Tensor const&)", "/x/torch/lib/libtorch_cpu.so", 7),
       frame("torch::autograd::generated::PowBackward0::apply(std::vector<at::Tensor>&&)",
             "/x/torch/lib/libtorch_cpu.so", 8),
       frame("torch::autograd::Engine::thread_main(std::shared_ptr<GraphTask> const&)", "/x/torch/lib/libtorch_cpu.so",
             9)});
  const Report bare = report_on(leaking(3, kNoFrames, true)), named = report_on(leaking(3, engine, true));
  CHECK(bare.devices[0].failure->phase == Phase::backward);
  CHECK(bare.devices[0].failure->node == "backward");
  CHECK(to_text(bare, {}).find("where      a node of backward") != std::string::npos);
  CHECK(named.devices[0].failure->phase == Phase::backward);
  CHECK(named.devices[0].failure->node == "PowBackward0");
  CHECK(named.devices[0].failure->op == "aten::mul_Tensor");
  CHECK(named.devices[0].failure->native_stack.size() == 3);

  const Report forward = report_on(leaking(3, in_forward(10), true)),
               optimizer = report_on(leaking(3, in_optimizer(), true));
  CHECK(forward.devices[0].failure->phase == Phase::forward);
  CHECK(forward.devices[0].failure->stack.size() == 3);
  CHECK(optimizer.devices[0].failure->phase == Phase::optimizer);
}

TEST_CASE("where no stack has a Python frame, none says backward", "[snapshot]") {
  const Report report = report_on(snapshot({segment(kAddress, 20_MiB, {block(20_MiB, 20_MiB, "active_allocated")})},
                                           {entry("segment_alloc", kAddress, 20_MiB), entry("alloc", kAddress, 20_MiB),
                                            entry("oom", 1_MiB, 64_MiB, kNoFrames)}));
  CHECK(report.devices[0].failure->phase == Phase::other);
  CHECK(to_text(report, {}).find("where      not known") != std::string::npos);
}

TEST_CASE("nothing is concluded about a GPU whose size is not given; if it is given, it is", "[snapshot]") {
  const std::string at_oom =
      snapshot({segment(kAddress, 20_MiB, {block(20_MiB, 20_MiB, "active_allocated", in_forward(3))})},
               {entry("segment_alloc", kAddress, 20_MiB), entry("alloc", kAddress, 20_MiB, in_forward(3)),
                entry("oom", 5_MiB, 3_GiB, in_forward(4))});
  const Report unknown = report_on(at_oom);
  CHECK(unknown.devices[0].cause->kind == CauseKind::capacity);
  CHECK(to_text(unknown, {}).find("GPU?       a snapshot does not record it") != std::string::npos);

  const Report small = report_on(at_oom, 2_GiB), shared = report_on(at_oom, 8_GiB);
  CHECK(small.devices[0].cause->kind == CauseKind::oversized_request);
  CHECK(shared.devices[0].cause->kind == CauseKind::non_pytorch);
  CHECK(shared.devices[0].memory.non_pytorch_bytes == 8_GiB - 25_MiB);
  CHECK(to_text(shared, {}).find("GPU?") == std::string::npos);
}

TEST_CASE("the GPU is never taken as smaller than what was reserved", "[snapshot]") {
  const Report report = report_on(snapshot(
      {}, {entry("segment_alloc", kAddress, 40_MiB), entry("segment_free", kAddress, 40_MiB),
           entry("segment_alloc", kAddress, 20_MiB), entry("alloc", kAddress, 20_MiB), entry("oom", 1_MiB, 9_MiB)}));
  CHECK(report.devices[0].device.total_bytes == 40_MiB);
}

TEST_CASE("lines stand there beside optimizer state, and what they do not name is in a row of its own", "[snapshot]") {
  std::vector<std::string> entries = {entry("segment_alloc", kAddress, 200_MiB)};
  int64_t at = kAddress;
  const auto add = [&](int64_t bytes, const std::string& frames) {
    entries.push_back(entry("alloc", at, bytes, frames, 1000 + at - kAddress));
    at += bytes;
  };
  add(8_MiB, in_optimizer());
  for (int64_t line = 1; line <= 60; ++line) add(2_MiB, in_forward(line));
  const Report report = report_on(snapshot({}, entries));
  const auto& owners = report.devices[0].allocations;
  REQUIRE(owners.size() == 50);
  CHECK(owners.back().name == "others");
  int64_t sum = 0;
  for (const ReportOwner& owner : owners) sum += owner.bytes;
  CHECK(sum == report.devices[0].memory.allocated_bytes);
  const std::string words = to_text(report, {.all = true});
  const size_t unknown = words.find("    unknown");
  REQUIRE(unknown != words.npos);
  CHECK(words.find("      train.py:", unknown) < words.find("      others", unknown));
}

TEST_CASE("paths of Windows are distinguished like others", "[snapshot]") {
  const std::string packages = "C:\\Users\\me\\AppData\\Python\\Python311\\Lib\\site-packages\\";
  const Snapshot found = read(snapshot(
      {},
      {entry("alloc", kAddress, 1_MiB,
             list({frame("step", packages + "torch\\optim\\adam.py", 1), frame("run", packages + "trainer\\loop.py", 7),
                   frame("_call_impl", packages + "torch\\nn\\modules\\module.py", 9),
                   frame("run", "C:\\Users\\me\\AppData\\Python\\Python311\\Lib\\threading.py", 2),
                   frame("main", "D:\\work\\train.py", 31)}))}));
  const SnapshotPlace& place = found.places.at(found.traces.at(0)[0].context);
  CHECK(found.names[place.source] == "D:/work/train.py:31");
  CHECK(found.names[place.inner_source] == "trainer/loop.py:7");
  CHECK(found.names[place.scope] == "Optimizer.step");
  CHECK(place.in_module);
}

TEST_CASE("segments that contradict each other are said", "[snapshot]") {
  const auto limits_of = [](int64_t second, int64_t block_bytes) {
    const Report report =
        report_on(snapshot({segment(kAddress, 20_MiB, {block(block_bytes, block_bytes, "active_allocated")}),
                            segment(second, 20_MiB, {block(20_MiB, 0, "inactive")})},
                           {entry("segment_alloc", second, 20_MiB)}));
    return std::ranges::count_if(report.limitations, [](const std::string& limit) {
      return limit.find("of its segments overlap") != limit.npos;
    });
  };
  CHECK(limits_of(kAddress + 20_MiB, 20_MiB) == 0);
  CHECK(limits_of(kAddress + 10_MiB, 20_MiB) == 1);
  CHECK(limits_of(kAddress + 20_MiB, 30_MiB) == 1);
}
