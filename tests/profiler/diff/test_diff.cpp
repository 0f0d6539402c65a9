#include "profiler/diff/diff.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

namespace {

Report report_with(std::vector<OwnedBytes> lines, int64_t allocated = 8_GiB) {
  Report report;
  ReportOfDevice& card = report.devices.emplace_back();
  card.peak.allocated_bytes = allocated;
  card.peak.reserved_bytes = allocated;
  card.card.allocated_bytes = allocated;
  card.owners_by.line = std::move(lines);
  return report;
}

}  // namespace

TEST_CASE("a report and itself differ in nothing", "[diff]") {
  const Report report = report_with({{"train.py:31", 4_GiB, 3}});
  CHECK(diff(report, report).is_empty());
  CHECK(to_text(diff(report, report)) == "oomdiag: no difference\n");
}

TEST_CASE("what runs of one program differ by does not count", "[diff]") {
  const Report before = report_with({{"train.py:31", 4_GiB, 3}});
  Report after = report_with({{"train.py:31", 4_GiB + 4_MiB, 3}}, 8_GiB + 4_MiB);
  after.devices[0].peak.reserved_bytes += 100_MiB;  // another layout of addresses
  CHECK(diff(before, after).is_empty());
  CHECK_FALSE(diff(report_with({{"a.py:1", 1_MiB, 1}}, 9_MiB), report_with({{"a.py:1", 5_MiB, 1}}, 13_MiB)).is_empty());
}

TEST_CASE("what grew is told by its line, wherever the project lies and however its lines moved", "[diff]") {
  const Report before = report_with({{"/a/net/train.py:31", 4_GiB, 3}, {"/a/net/train.py:50", 2_GiB, 1}});
  const Report after = report_with(
      {{"/b/net/train.py:31", 5_GiB, 3}, {"/b/net/train.py:54", 2_GiB, 1}, {"/b/net/x.py:1", 1_GiB, 1}}, 10_GiB);
  const ReportDiff found = diff(before, after);
  CHECK(found.lines == std::vector<DiffRow>{{"net/train.py:31", 4_GiB, 5_GiB}, {"net/x.py:1", 0, 1_GiB}});
  CHECK(found.figures == std::vector<DiffRow>{{"peak allocated", 8_GiB, 10_GiB}, {"peak reserved", 8_GiB, 10_GiB}});
  const std::string words = to_text(found);
  CHECK(words.find("+1.00") != words.npos);
  CHECK(words.find("net/x.py:1") != words.npos);
}

TEST_CASE("of modules inside of each other the innermost that tells all is named, layers as one", "[diff]") {
  Report before = report_with({}), after = report_with({});
  before.devices[0].owners_by.module = {{"model", 2_GiB, 9}, {"model.h.0", 1_GiB, 3}, {"model.h.1", 1_GiB, 3}};
  after.devices[0].owners_by.module = {{"model", 4_GiB, 9}, {"model.h.0", 2_GiB, 3}, {"model.h.1", 2_GiB, 3}};
  CHECK(diff(before, after).modules == std::vector<DiffRow>{{"model.h.*", 2_GiB, 4_GiB}});
}

TEST_CASE("another end is a difference, also where the bytes are the same", "[diff]") {
  const Report before = report_with({});
  Report after = report_with({});
  after.outcome = "out_of_memory";
  after.devices[0].cause = ReportCause{.kind = CauseKind::capacity};
  const ReportDiff found = diff(before, after);
  CHECK_FALSE(found.is_empty());
  CHECK(to_text(found).find("ok before, out of memory (capacity) after") != std::string::npos);
}
