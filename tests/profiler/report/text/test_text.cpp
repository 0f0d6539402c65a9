#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "profiler/report/make/make_report.h"
#include "profiler/report/text/text.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Compares with tests/golden/`name`; OOMDIAG_UPDATE_GOLDENS=1 writes it instead.
void check_golden(const std::string& name, const std::string& text) {
  const std::string path = std::string(OOMDIAG_GOLDEN_FOLDER) + "/" + name;
  if (std::getenv("OOMDIAG_UPDATE_GOLDENS") != nullptr) std::ofstream(path) << text;
  CHECK(text == read_file(path));
}

std::string text_of(const Trace& trace, const ReportInputs& inputs) {
  return to_text(make_report(trace, inputs), {.all = true});
}

std::string first_screen_of(const Trace& trace, const ReportInputs& inputs) {
  return to_text(make_report(trace, inputs));
}

/// 8 steps, each of which keeps 16 MiB more; 1 GiB in all.
Trace growing_training() {
  EventBuilder trace({.gpu_bytes = 1_GiB});
  const SmallTraining training;
  training.setup(trace);
  for (uint64_t step = 0; step < 8; ++step) {
    training.forward(trace, step * 3);
    trace.op({.op = "aten::clone", .source = "train.py:20"}).alloc("kept " + std::to_string(step), 16_MiB).no_op();
    training.backward(trace, step * 3);
    training.optimizer(trace, step == 0);
    training.zero_grad(trace);
  }
  return trace;
}

}  // namespace

TEST_CASE("an OOM in backward reads well", "[report][golden]") {
  check_golden("oom_in_backward.txt",
               text_of(oom_in_backward(), {.exit_code = 1, .batch = 64, .folder = "oomdiag-4711"}));
}

TEST_CASE("an OOM in forward reads well", "[report][golden]") {
  check_golden("oom_in_forward.txt", text_of(oom_in_forward(), {.exit_code = 1, .folder = "oomdiag-4711"}));
}

TEST_CASE("an OOM in the optimizer reads well", "[report][golden]") {
  check_golden("oom_in_optimizer.txt", text_of(oom_in_optimizer(), {.exit_code = 1, .folder = "oomdiag-4711"}));
}

TEST_CASE("a run that fits reads well", "[report][golden]") {
  check_golden("fits.txt", text_of(training_that_fits(), {.exit_code = 0, .batch = 64, .folder = "oomdiag-4711"}));
}

TEST_CASE("a leak reads well", "[report][golden]") {
  EventBuilder trace({.gpu_bytes = 1_GiB});
  const SmallTraining training;
  training.setup(trace);
  for (uint64_t step = 0; step < 8; ++step) {
    training.forward(trace, step * 3);
    const std::string now = std::to_string(step);
    for (const char* layer : {"0", "1"}) {  // a cache of keys, made anew and larger
      trace.op({.op = "aten::cat", .module = fmt::format("h.{}.attention", layer), .source = "cache_utils.py:136"});
      trace.alloc(fmt::format("keys {} {}", layer, step), static_cast<int64_t>(step + 1) * 10_MiB).no_op();
      if (step > 0) trace.free(fmt::format("keys {} {}", layer, step - 1));
    }
    trace.op({.op = "aten::clone", .source = "train.py:20"}).alloc("kept " + now, 16_MiB).no_op();
    training.backward(trace, step * 3);
    training.optimizer(trace, step == 0);
    training.zero_grad(trace);
  }
  trace.op({.op = "aten::relu", .source = "train.py:11"}).nodes(24).alloc("x", 384_MiB).oom(400_MiB).op_failed();
  check_golden("leak.txt", text_of(trace, {.exit_code = 1, .folder = "oomdiag-4711"}));
}

TEST_CASE("the first screen of an OOM answers", "[report][golden]") {
  check_golden("first_screen.txt",
               first_screen_of(oom_in_backward(), {.exit_code = 1, .batch = 64, .folder = "oomdiag-4711"}));
}

TEST_CASE("the first screen has at most 24 lines", "[report]") {
  for (const Trace& trace :
       {oom_in_backward(), oom_in_forward(), oom_in_optimizer(), training_that_fits(), growing_training()}) {
    const std::string text = first_screen_of(trace, {.exit_code = 1, .folder = "oomdiag-4711"});
    INFO(text);
    CHECK(std::ranges::count(text, '\n') <= 24);
  }
}

TEST_CASE("a run that fits and grows is headlined by the step that will run out of memory", "[report]") {
  const Report report = make_report(growing_training(), {.exit_code = 0, .folder = "oomdiag-4711"});
  const ReportOfDevice& device = report.devices.front();
  REQUIRE(device.out_of_memory_near_step);
  CHECK(*device.out_of_memory_near_step == 8 + static_cast<uint32_t>(device.headroom_bytes / 16_MiB));
  const std::string text = to_text(report);
  INFO(text);
  CHECK(text.starts_with(fmt::format("oomdiag: fits so far, grows 16.00 MiB per step: out of memory near step {}",
                                     *device.out_of_memory_near_step)));
  CHECK(text.find("train.py:20") != text.npos);
}

TEST_CASE("of a run that fits no growth is reported that would need a million steps more", "[report]") {
  Trace trace = growing_training();
  trace.devices.front().total_bytes = int64_t{1} << 45;
  const Report report = make_report(trace, {.exit_code = 0});
  CHECK_FALSE(report.devices.front().out_of_memory_near_step);
  CHECK(report.devices.front().growth.empty());
  CHECK(to_text(report).starts_with("oomdiag: fits"));
}

TEST_CASE("memory that many streams keep for themselves is reported, and that of a few is not", "[report]") {
  Report report = make_report(training_that_fits(), {.exit_code = 0});
  ReportPeak& peak = report.devices.front().peak;
  peak.cached_for_streams_bytes = peak.reserved_bytes / 2;
  peak.streams = 3;
  CHECK(to_text(report).find("streams") == std::string::npos);
  peak.streams = 31;
  CHECK(to_text(report).find("are cached for 31 streams, each for itself alone") != std::string::npos);
}

TEST_CASE("a run whose OOMs were caught did not fit: neither headline nor batch say so", "[report]") {
  Report report = make_report(training_that_fits(), {.exit_code = 0, .batch = 64});
  report.outcome = "caught";
  report.devices.front().caught_count = 3;
  CHECK(to_text(report).starts_with("oomdiag: ran out of memory 3 times on cuda:0, caught by the program"));
  report.devices.front().caught_at_least = true;
  CHECK(to_text(report).starts_with("oomdiag: ran out of memory at least 3 times on cuda:0, caught by the program"));
}

TEST_CASE("a run that went on in host memory does not fit the GPU, and the report says how much", "[report]") {
  Report report = make_report(training_that_fits(), {.exit_code = 0});
  CHECK(report.devices.front().peak.host_memory_bytes == 0);
  Trace trace = training_that_fits();
  trace.devices.front().total_bytes = report.devices.front().peak.reserved_bytes - 3_MiB;
  trace.devices.front().context_bytes = 1_MiB;
  report = make_report(trace, {.exit_code = 0});
  CHECK(report.devices.front().peak.host_memory_bytes == 4_MiB);
  const std::string text = to_text(report);
  INFO(text);
  CHECK(text.starts_with("oomdiag: does not fit the GPU: Windows' driver keeps 4.00 MiB in host memory, peak in"));
  CHECK(text.find("@wddm+0") != text.npos);
  CHECK(text.find("headroom") == text.npos);
}

TEST_CASE("after fix the measured winner stands first, and fix is not offered again", "[report]") {
  Report report = make_report(oom_in_backward(), {.exit_code = 1, .folder = "oomdiag-4711"});
  CHECK(to_text(report).find("next: oomdiag fix oomdiag-4711") != std::string::npos);
  report.devices.front().fixes.push_back({.id = "offload_activations",
                                          .label = "offload activations to CPU",
                                          .how = {"model.forward = saved_on_host(model.forward)"},
                                          .measured_peak_bytes = 64_MiB,
                                          .fits = true});
  const std::string text = to_text(report);
  INFO(text);
  CHECK(text.find("fix        model.forward = saved_on_host(model.forward)   64.00 MiB, fits (measured)") != text.npos);
  CHECK(text.find("oomdiag fix") == text.npos);
}

TEST_CASE("where fix ran all and none fits, it is said, and fix is not offered again", "[report]") {
  Report report = make_report(oom_in_backward(), {.exit_code = 1, .folder = "oomdiag-4711"});
  report.devices.front().fixes = {
      {.id = "half_batch", .label = "half the batch", .measured_peak_bytes = 9_GiB, .fits = false}};
  const std::string text = to_text(report);
  INFO(text);
  CHECK(text.find("none of those that oomdiag fix ran makes it fit") != text.npos);
  CHECK(text.find("next: oomdiag fix") == text.npos);
}

TEST_CASE("of two fixes of which a program takes one the second gives way on the first screen", "[report]") {
  Report report = make_report(oom_in_backward(), {.exit_code = 1});
  const auto fix = [](const char* id) { return Fix{.id = id, .label = id, .predicted_peak_bytes = 64_MiB}; };
  report.devices.front().fixes = {fix("autocast_bf16"), fix("accumulate_2"), fix("half_batch"), fix("checkpoint")};
  const std::string text = to_text(report);
  INFO(text);
  CHECK(text.find("    half_batch") == text.npos);
  CHECK(text.find("    accumulate_2") < text.find("    checkpoint"));
  CHECK(text.find("    checkpoint") != text.npos);
}

TEST_CASE("a killed run reads well", "[report][golden]") {
  Trace trace = training_that_fits();
  trace.process.end_state = EndState::running;
  trace.events.in_memory().resize(trace.events.size() / 2);
  check_golden("killed.txt", text_of(trace, {.signal = 9, .folder = "oomdiag-4711"}));
}

TEST_CASE("a program that never allocated gets one line", "[report][golden]") {
  EventBuilder trace;
  check_golden("nothing_allocated.txt", text_of(trace, {.exit_code = 0}));
}

TEST_CASE("without UTF-8 the report is plain ASCII", "[report]") {
  const Report report = make_report(oom_in_backward(), {.exit_code = 1});
  const std::string text = to_text(report, {.unicode = false});
  for (const char c : text) CHECK((c == '\n' || (c >= 0x20 && c < 0x7F)));
}

}  // namespace oomdiag
