#include <algorithm>

#include "profiler/report/text/text.h"
#include "samples/cases/notes.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

CaseRun run_of(const std::string& variant, int64_t peak_bytes) {
  CaseRun run{.variant = variant, .report = {}, .scopes = {}, .facts = {}};
  run.report.devices.emplace_back().peak.allocated_bytes = peak_bytes;
  return run;
}

ReportOfDevice& gpu(CaseRun& run) { return run.report.devices.front(); }

int64_t figure_of(const ReportCase& report_case, const std::string& name) {
  for (const auto& [key, value] : report_case.figures) {
    if (key == name) return value;
  }
  FAIL("no figure " << name);
  return 0;
}

bool says(const ReportCase& report_case, const std::string& words) {
  const auto has = [&](const std::string& note) { return note.find(words) != note.npos; };
  return std::any_of(report_case.notes.begin(), report_case.notes.end(), has);
}

ReportCase explain(const char* id, const std::vector<CaseRun>& runs) {
  const auto report_case = explain_case(id, "about it", runs);
  REQUIRE(report_case.has_value());
  return *report_case;
}

}  // namespace

TEST_CASE("a model without a case says nothing alone and compares its variants", "[cases]") {
  CHECK_FALSE(explain_case("", "x", std::vector{run_of("", 1_GiB)}).has_value());
  CHECK(figure_of(explain("", {run_of("a", 1_GiB), run_of("b", 2_GiB)}), "b.peak_bytes") == 2_GiB);
}

TEST_CASE("every case survives runs that left nothing", "[cases]") {
  for (int n = 1; n <= 19; ++n) {
    const std::string id = "S" + std::to_string(n);
    const CaseRun nothing{.variant = "x", .report = {}, .scopes = {}, .facts = {}};
    CHECK(explain_case(id, "about", std::vector{nothing}).has_value());
  }
}

TEST_CASE("S9: the doubling is named and in place is proved", "[cases]") {
  auto copy = run_of("copy", 8_GiB), in_place = run_of("in_place", 4_GiB);
  copy.scopes.calls = {{.name = "x", .kept_bytes = 4_GiB}, {.name = "y", .begin_bytes = 4_GiB, .peak_bytes = 8_GiB}};
  in_place.scopes.calls = {{.name = "x", .kept_bytes = 4_GiB},
                           {.name = "y", .begin_bytes = 4_GiB, .peak_bytes = 4_GiB}};
  in_place.facts["same_storage"] = "1";

  const ReportCase report_case = explain("S9", {copy, in_place});

  CHECK(says(report_case, "2.00 times"));
  CHECK(says(report_case, "x.add_(1) takes 0 B more, and its result lies where x lies"));
}

TEST_CASE("S3: a loop that clears gradients between its passes is a defect", "[cases]") {
  auto good = run_of("accumulated", 1_GiB), bad = run_of("zero_grad_inside", 1_GiB);
  good.scopes.calls = {{.name = "zero_grad"}, {.name = "backward"}, {.name = "backward"}, {.name = "optimizer"}};
  bad.scopes.calls = {
      {.name = "zero_grad"}, {.name = "backward"}, {.name = "zero_grad"}, {.name = "backward"}, {.name = "optimizer"}};

  CHECK(says(explain("S3", {good, bad}), "1 of 2 backward passes are thrown away"));
  bad.scopes.calls.erase(bad.scopes.calls.begin() + 2);
  CHECK_FALSE(says(explain("S3", {good, bad}), "Defect"));
}

TEST_CASE("S10: memory grows only if it does", "[cases]") {
  auto never = run_of("never", 1_MiB);
  never.scopes.calls = {{.name = "step", .end_bytes = 512}, {.name = "step", .end_bytes = 512}};
  CHECK(says(explain("S10", {never}), "does not grow"));
  never.scopes.calls.back().end_bytes = 1024;
  CHECK(says(explain("S10", {never}), "memory grows"));
}

TEST_CASE("S11: growth is that of the later steps, and its owner has a block for each", "[cases]") {
  auto run = run_of("losses", 30_MiB);
  for (const int64_t end : {10_MiB, 18_MiB, 20_MiB, 22_MiB, 24_MiB}) {
    run.scopes.calls.push_back({.name = "step", .end_bytes = end});
    gpu(run).allocations.push_back({.category = Category::activation, .bytes = 2_MiB, .name = "relu"});
  }
  gpu(run).allocations.push_back({.category = Category::activation, .bytes = 20_MiB, .name = "once"});

  const ReportCase report_case = explain("S11", {run});

  CHECK(figure_of(report_case, "losses.growth_per_step_bytes") == 2_MiB);
  CHECK(says(report_case, "relu (5 blocks, 10.00 MiB)"));
  CHECK_FALSE(says(report_case, "once"));
}

TEST_CASE("S4: copies of weights are 16-bit saved tensors with a parameter's shape, also transposed", "[cases]") {
  auto autocast = run_of("autocast", 1_GiB), full = run_of("float32", 2_GiB);
  gpu(autocast).allocations = {
      {.category = Category::parameter, .bytes = 4000, .name = "fc", .shape = "[10, 100] float32"}};
  gpu(autocast).saved_tensors = {{.bytes = 2048, .shape = {100, 10}, .dtype = "float16"},
                                 {.bytes = 4096, .shape = {100, 10}, .dtype = "float32"},
                                 {.bytes = 8192, .shape = {64, 100}, .dtype = "float16"}};

  CHECK(figure_of(explain("S4", {autocast, full}), "autocast.weight_copies_bytes") == 2048);
}

TEST_CASE("S5: the segments with the lowest peak that ran are picked", "[cases]") {
  auto failed = run_of("segments_8", 1_MiB);
  failed.report.outcome = "out_of_memory";
  const ReportCase report_case = explain("S5", {run_of("segments_4", 3_MiB), run_of("whole", 9_MiB), failed});
  CHECK(says(report_case, "Pick segments_4: 6.00 MiB less"));
  CHECK(says(report_case, "segments_8, out of memory"));
}

TEST_CASE("S16: equal blocks are duplicates only if there are two", "[cases]") {
  auto twice = run_of("twice", 64_MiB), once = run_of("once", 32_MiB);
  gpu(twice).allocations = {{.category = Category::input, .bytes = 32_MiB, .name = "b"},
                            {.category = Category::input, .bytes = 32_MiB, .name = "a"}};
  CHECK(says(explain("S16", {twice, once}), "2 blocks of 32.00 MiB each, made by a and b"));
  gpu(twice).allocations.pop_back();
  CHECK_FALSE(says(explain("S16", {twice, once}), "blocks of"));
}

TEST_CASE("a figure that would read nothing makes the table finer", "[cases]") {
  const ReportCase report_case = explain("", {run_of("a", 3_MiB), run_of("b", 512)});
  CHECK(says(report_case, "variant, KiB"));
  CHECK(says(report_case, "0.50"));
}

TEST_CASE("the paragraph of a case wraps sentences and leaves tables", "[cases]") {
  std::string sentence = "word";
  for (int i = 0; i < 40; ++i) sentence += " word";
  const std::string row = "    " + std::string(100, '-');
  const std::string text = case_text({.id = "S1", .about = "x", .notes = {sentence, row}, .figures = {}});

  CHECK(text.starts_with("  case S1: x\n    word"));
  CHECK(text.find(row) != text.npos);
  CHECK(text.find(sentence) == text.npos);
}

}  // namespace oomdiag
