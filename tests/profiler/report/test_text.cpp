#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "profiler/report/make_report.h"
#include "profiler/report/text.h"
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

std::string text_of(const Trace& trace, const ReportInputs& inputs) { return to_text(make_report(trace, inputs)); }

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
  EventBuilder trace({.card_bytes = 1_GiB});
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
  trace.op({.op = "aten::relu", .source = "train.py:11"}).nodes(24).alloc("x", 384_MiB).refuse(400_MiB).op_failed();
  check_golden("leak.txt", text_of(trace, {.exit_code = 1, .folder = "oomdiag-4711"}));
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
