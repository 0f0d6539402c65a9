#include "profiler/diff/budget.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

namespace {

Report run_of(int64_t allocated, int64_t growth = 0) {
  Report report;
  ReportOfDevice& gpu = report.devices.emplace_back();
  gpu.peak.allocated_bytes = allocated;
  gpu.peak.reserved_bytes = allocated;
  if (growth > 0) gpu.growth.push_back({.kind = GrowthKind::kept_tensors, .bytes_per_step = growth});
  return report;
}

std::vector<bool> kept(const std::vector<Verdict>& verdicts) {
  std::vector<bool> list;
  for (const Verdict& one : verdicts) list.push_back(one.kept);
  return list;
}

}  // namespace

TEST_CASE("each budget has its verdict, and what is exactly allowed is kept", "[budget]") {
  const Budgets budgets{.max_allocated_bytes = 8_GiB, .max_reserved_bytes = 8_GiB, .max_growth_bytes = 1_MiB};
  CHECK(kept(check(run_of(8_GiB, 1_MiB), budgets)) == std::vector<bool>{true, true, true, true});
  const auto verdicts = check(run_of(9_GiB, 2_MiB), budgets);
  CHECK(kept(verdicts) == std::vector<bool>{true, false, false, false});
  CHECK(verdicts[1].words == "9.00 GiB of 8.00 GiB, 1.00 GiB above");
  CHECK(verdicts[3].words == "2.00 MiB of 1.00 MiB per step, 1.00 MiB above");
}

TEST_CASE("of several GPUs and ranks the highest counts", "[budget]") {
  Report report = run_of(1_GiB);
  report.devices.push_back(run_of(3_GiB).devices[0]);
  CHECK(kept(check(report, {.max_allocated_bytes = 2_GiB})) == std::vector<bool>{true, false});
  ReportRank rank;
  rank.peak.allocated_bytes = 5_GiB;
  report.ranks.push_back(rank);
  CHECK(kept(check(report, {.max_allocated_bytes = 4_GiB})) == std::vector<bool>{true, false});
}

TEST_CASE("a run that ran out of memory keeps no budget, however small its peak", "[budget]") {
  Report report = run_of(1_GiB);
  report.outcome = "out_of_memory";
  CHECK(kept(check(report, {.max_allocated_bytes = 2_GiB})) == std::vector<bool>{false, true});
}

TEST_CASE("a baseline allows its own figures and the tolerance, and names what grew", "[budget]") {
  Report before = run_of(10_GiB), after = run_of(11_GiB);
  before.devices[0].allocated_by.line = {{"train.py:3", 1_GiB, 1}};
  after.devices[0].allocated_by.line = {{"train.py:3", 2_GiB, 1}};
  CHECK(kept(check(after, {.baseline = before, .tolerance = 0.1})) == std::vector<bool>{true, true, true, true});
  const auto verdicts = check(after, {.baseline = before, .tolerance = 0.02});
  CHECK(kept(verdicts) == std::vector<bool>{true, false, false, true});
  CHECK(verdicts[1].words.ends_with("; most of it: train.py:3 +1.00 GiB"));
}

TEST_CASE("verdicts become JUnit's XML and annotations, whatever stands in them", "[budget]") {
  const std::vector<Verdict> verdicts = {{"max allocated", false, "9 of \"8\" & <more>"}, {"max growth", true, "none"}};
  const std::string xml = to_junit(verdicts, "a<b>.json");
  CHECK(xml.find("tests=\"2\" failures=\"1\"") != xml.npos);
  CHECK(xml.find("<failure message=\"9 of &quot;8&quot; &amp; &lt;more&gt;\"/>") != xml.npos);
  CHECK(xml.find("classname=\"a&lt;b&gt;.json\"") != xml.npos);
  CHECK(to_github({{"max allocated", false, "2 % above"}}, "r.json") ==
        "::error title=oomdiag max allocated::r.json: 2 %25 above\n");
}

TEST_CASE("a run that needed host memory is not kept", "[budget]") {
  oomdiag::Report report{.outcome = "ok", .devices = {oomdiag::ReportOfDevice{}}};
  report.devices.front().peak.host_memory_bytes = 1 << 20;
  CHECK_FALSE(check(report, {}).front().kept);
  CHECK(check(report, {}).front().words == "does not fit the GPU: 1.00 MiB of it in host memory");
}

TEST_CASE("a run whose OOMs were caught, or that grows until it will run out, is not kept", "[budget]") {
  oomdiag::Report report{.outcome = "caught", .devices = {oomdiag::ReportOfDevice{}}};
  CHECK_FALSE(check(report, {}).front().kept);
  report.outcome = "ok";
  CHECK(check(report, {}).front().kept);
  report.devices.front().out_of_memory_near_step = 1450;
  CHECK_FALSE(check(report, {}).front().kept);
  CHECK(check(report, {}).front().words == "fits so far, and grows: out of memory near step 1450");
}
