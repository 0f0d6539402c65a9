#include <algorithm>

#include "profiler/report/json/json.h"
#include "profiler/report/make/make_report.h"
#include "profiler/report/text/text.h"
#include "profiler/report/words/printable.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

/// Everything that a terminal would obey: ESC, BEL, DEL, C1 as UTF-8 and as a byte, a line end, right-to-left marks, half a
/// character.
const std::string kHostile = "\x1b[31m\a\x7f\xc2\x9b\x9b\n\xe2\x80\xae\xe2\x81\xa6\xe2\x80";

bool is_safe(const std::string& text) {
  for (const char* obeyed : {"\x1b", "\a", "\x7f", "\xc2\x9b", "\xe2\x80\xae", "\xe2\x81\xa6"}) {
    if (text.find(obeyed) != text.npos) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("JSON on a terminal has nothing that it would obey, and says the same", "[report]") {
  Report report;
  report.command = "python \xc2\x9b\x31m größe \xe2\x80\xae \x7f \x9b";
  const std::string json = to_json(report);
  CHECK(is_safe(json));
  CHECK(json.find("python \\u009b1m größe \\u202e \\u007f \xef\xbf\xbd") != json.npos);
  CHECK(from_json(json).command == "python \xc2\x9b\x31m größe \xe2\x80\xae \x7f \xef\xbf\xbd");
}

TEST_CASE("what a terminal would obey is replaced, and letters of all languages stay", "[report]") {
  CHECK(printable(kHostile, 100) == "?[31m?????????");
  CHECK(printable("größe 大きさ → ‰", 100) == "größe 大きさ → ‰");
  CHECK(printable("\xc0\x80 \xed\xa0\x80 \xf5\x80\x80\x80", 100) == "?? ??? ????");  // too long, a surrogate, too large
  CHECK(printable_lines("a\tb\nc\x1b") == "a b\nc?");
  CHECK(printable_lines("é ← × ∙ ≤", false) == "? <- x * <=");
}

TEST_CASE("what is too wide is cut between characters", "[report]") {
  CHECK(printable("äöüäöüäöü", 8) == "äö...äöü");
  CHECK(count_columns(printable("äöüäöüäöüäöü", 9)) == 9);
  CHECK(printable_end("layer3.5.conv2.weight", 12) == "...v2.weight");
}

TEST_CASE("no name of a trace reaches the terminal as it is, nor adds a line", "[report]") {
  for (const Trace& clean : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    Trace hostile = clean;
    for (std::string& name : hostile.names) {
      if (!name.empty() && name.find("::") == name.npos && !name.starts_with("Optimizer")) name += kHostile;
    }
    hostile.process.torch_version = hostile.process.command = kHostile;
    hostile.devices.front().name = kHostile;
    Report bad = make_report(hostile, {.exit_code = 1, .folder = kHostile});
    Report good = make_report(clean, {.exit_code = 1, .folder = "f"});
    CHECK(is_safe(to_text(bad)));
    bad.devices.front().fixes.clear();  // of a shape that is none fewer are known
    good.devices.front().fixes.clear();
    CHECK(std::ranges::count(to_text(bad), '\n') == std::ranges::count(to_text(good), '\n'));
  }
}

TEST_CASE("no text of a report file reaches the terminal as it is", "[report]") {
  Report report = make_report(oom_in_backward(), {.exit_code = 1});
  ReportOfDevice& device = report.devices.front();
  device.failure->module = device.device.compute_capability = kHostile;
  device.allocations.front().shape = kHostile;
  device.fixes.front().label = kHostile;
  report.ranks = {{.outcome = kHostile}, {.rank = 1, .outcome = "out_of_memory", .failure = device.failure}};
  report.limitations.push_back(kHostile);
  CHECK(is_safe(to_text(report)));
  report.outcome = kHostile;
  CHECK(is_safe(to_text(report)));
}

}  // namespace oomdiag
