#include <algorithm>
#include <functional>

#include "profiler/diff/diff.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

namespace {

Report report_with(std::vector<OwnedBytes> lines, int64_t allocated = 8_GiB) {
  Report report;
  ReportOfDevice& gpu = report.devices.emplace_back();
  gpu.peak.allocated_bytes = allocated;
  gpu.peak.reserved_bytes = allocated;
  gpu.memory.allocated_bytes = allocated;
  gpu.allocated_by.line = std::move(lines);
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

TEST_CASE("growth counts from 64 KiB on, whatever is allocated, or from what the user says", "[diff]") {
  const Report before = report_with({});
  Report after = before;
  after.devices[0].growth = {{.bytes_per_step = 1_MiB}};
  CHECK(diff(before, after).figures == std::vector<DiffRow>{{"growth per step", 0, 1_MiB}});
  CHECK(diff(before, after, {.least_bytes = 1_GiB}).is_empty());
}

TEST_CASE("what grew is named by its line, wherever the project lies and however its lines moved", "[diff]") {
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

TEST_CASE("of modules inside of each other the innermost that covers all is named, layers as one", "[diff]") {
  Report before = report_with({}), after = report_with({});
  before.devices[0].allocated_by.module = {{"model", 2_GiB, 9}, {"model.h.0", 1_GiB, 3}, {"model.h.1", 1_GiB, 3}};
  after.devices[0].allocated_by.module = {{"model", 4_GiB, 9}, {"model.h.0", 2_GiB, 3}, {"model.h.1", 2_GiB, 3}};
  CHECK(diff(before, after).modules == std::vector<DiffRow>{{"model.h.*", 2_GiB, 4_GiB}});
}

namespace {

/// Modules of which those from `kMaxOwned` on are cut off, as list_owners does. `bytes` of the one numbered `grown`.
std::vector<OwnedBytes> cut_off(int grown, int64_t bytes) {
  std::vector<OwnedBytes> all;
  for (int i = 0; i < 150; ++i) all.push_back({"enc.m" + std::to_string(1000 + i), i == grown ? bytes : 1_MiB, 1});
  std::ranges::stable_sort(all, std::greater{}, &OwnedBytes::bytes);
  int64_t rest = 0;
  for (size_t i = kMaxOwned - 1; i < all.size(); ++i) rest += all[i].bytes;
  all.resize(kMaxOwned - 1);
  all.push_back({"others", rest, 51});
  return all;
}

}  // namespace

TEST_CASE("a name that one report lists and the other cuts off is listed with the least that it changed", "[diff]") {
  Report before = report_with({}, 100_MiB), after = report_with({}, 100_MiB);
  before.devices[0].allocated_by.module = cut_off(-1, 0);
  after.devices[0].allocated_by.module = cut_off(140, 1_MiB + 128_KiB);  // comes into the list, another one leaves it
  CHECK(diff(before, after).modules ==
        std::vector<DiffRow>{{"enc.m1140", 1_MiB, 1_MiB + 128_KiB, true}});  // the one that left held no more

  after.devices[0].allocated_by.module = cut_off(140, 64_MiB);
  const ReportDiff found = diff(before, after);
  CHECK(found.modules == std::vector<DiffRow>{{"enc.m1140", 1_MiB, 64_MiB, true}});
  CHECK(to_text(found).find("≥ +63.00") != std::string::npos);
}

TEST_CASE("of layers that are listed as one, those that are listed on one side only are taken as cut off", "[diff]") {
  Report before = report_with({}, 100_MiB), after = report_with({}, 100_MiB);
  const auto layers = [](int first) {
    std::vector<OwnedBytes> list;
    for (int i = first; i < first + 99; ++i) list.push_back({"h." + std::to_string(i) + ".mlp", 1_MiB, 1});
    list.push_back({"others", 51_MiB, 51});
    return list;
  };
  before.devices[0].allocated_by.module = layers(0);
  after.devices[0].allocated_by.module = layers(51);
  CHECK(diff(before, after).modules.empty());
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

TEST_CASE("no row shows a change of nothing, and the reports are named", "[diff]") {
  const ReportDiff small{
      .outcome_before = "ok", .outcome_after = "ok", .figures = {{"peak allocated", 10_GiB, 10_GiB + 1_MiB}}};
  CHECK(to_text(small, true, "a.json", "b.json")
            .starts_with("oomdiag: the reports differ: before a.json, after b.json\n"));
  CHECK(to_text(small).find("+1.00") != std::string::npos);
  const ReportDiff both{.outcome_before = "ok",
                        .outcome_after = "ok",
                        .figures = {{"peak allocated", 10_GiB, 12_GiB}},
                        .ops = {{"aten::mm", 10_MiB, 11_MiB}}};
  const std::string text = to_text(both);
  CHECK(text.find("aten::mm") == text.npos);
  CHECK(text.find("1 change of less than 0.01 GiB left out: --json\n") != text.npos);
}
