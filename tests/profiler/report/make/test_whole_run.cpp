#include "profiler/report/make/limitations.h"
#include "profiler/report/make/whole_run.h"
#include "tests/catch.h"

namespace oomdiag {
namespace {

/// Ran out on a GPU of 12 GiB, one of them taken by others.
Report failed_by(CauseKind cause) {
  ReportOfDevice device{.device = {.name = "gpu", .total_bytes = 12 * kGiB, .compute_capability = "8.6"},
                        .failure = ReportFailure{},
                        .cause = ReportCause{.kind = cause}};
  device.cause->evidence = {.requested_bytes = kGiB,
                            .segment_bytes = kGiB,
                            .total_bytes = 12 * kGiB,
                            .free_bytes = cause == CauseKind::fragmentation ? kGiB : 0,
                            .non_pytorch_bytes = kGiB,
                            .usual_non_pytorch_bytes = kGiB,
                            .allowed_bytes = 12 * kGiB};
  device.memory.non_pytorch_bytes = kGiB;
  device.fixes = {{.id = "expandable_segments", .label = "expandable_segments:True", .predicted_peak_bytes = 9 * kGiB}};
  return {.outcome = "out_of_memory", .devices = {device}, .limitations = {std::string(kNoWholeStep), "another"}};
}

Report whole_run(int64_t peak_bytes) {
  ReportOfDevice device{.device = {.name = "gpu", .total_bytes = 16384 * kGiB, .compute_capability = "8.6"},
                        .peak = {.allocated_bytes = peak_bytes}};
  device.fixes = {
      {.id = "checkpoint", .label = "checkpoint h.*", .predicted_peak_bytes = 5 * kGiB, .predicted_fits = true}};
  return {.outcome = "ok", .devices = {device}};
}

}  // namespace

TEST_CASE("the need of a failed run is that of the whole one, and what is outside", "[report]") {
  Report report = failed_by(CauseKind::capacity);
  take_whole_run(report, whole_run(13 * kGiB));
  CHECK(report.devices[0].required_bytes == 14 * kGiB);
  REQUIRE(report.devices[0].fixes.size() == 1);
  CHECK(report.devices[0].fixes[0].id == "checkpoint");
  CHECK(report.limitations == std::vector<std::string>{"another"});
}

TEST_CASE("the cure of the reason stays among the fixes, and first, whatever the whole run knows", "[report]") {
  Report report = failed_by(CauseKind::capacity);
  report.devices[0].reason = Reason{.id = "all_pairs", .text = "all pairs at once", .fix = "pairs_in_chunks"};
  report.devices[0].fixes.push_back(
      {.id = "pairs_in_chunks", .label = "pairs in chunks of rows", .predicted_peak_bytes = kGiB, .at_least = true});
  take_whole_run(report, whole_run(13 * kGiB));
  REQUIRE(report.devices[0].fixes.size() == 2);
  CHECK(report.devices[0].fixes[0].id == "pairs_in_chunks");
  CHECK(report.devices[0].fixes[0].at_least);
  CHECK(report.devices[0].fixes[1].id == "checkpoint");
  CHECK(report.devices[0].reason->id == "all_pairs");
}

TEST_CASE("a whole run without backward is the reason why a failed one kept graphs", "[report]") {
  Report report = failed_by(CauseKind::capacity);
  Report whole = whole_run(13 * kGiB);
  whole.devices[0].fixes = {{.id = "no_grad",
                             .label = "torch.no_grad(), as nothing runs backward",
                             .how = {"with torch.no_grad():"},
                             .predicted_peak_bytes = 12 * kGiB,
                             .predicted_fits = true}};
  take_whole_run(report, whole);
  CHECK_FALSE(report.devices[0].reason);  // too little of it

  whole.devices[0].fixes[0].predicted_peak_bytes = kGiB;
  take_whole_run(report, whole);
  REQUIRE(report.devices[0].reason);
  CHECK(report.devices[0].reason->text ==
        "forward passes keep autograd graphs, 12.00 GiB at the peak, and nothing in the whole run runs backward");
  CHECK(report.devices[0].reason->bytes == 12 * kGiB);
}

TEST_CASE("fragmentation is not the cause where the whole run does not fit anyway", "[report]") {
  Report report = failed_by(CauseKind::fragmentation);
  take_whole_run(report, whole_run(13 * kGiB));
  CHECK(report.devices[0].cause->kind == CauseKind::capacity);
  CHECK(report.devices[0].cause->short_by_bytes == 2 * kGiB);
  CHECK(report.devices[0].cause->evidence.step == StepNeed{.bytes = 13 * kGiB, .whole = true});
}

TEST_CASE("what was said of fragmentation gives way to the reason of a step that is too large", "[report]") {
  Report report = failed_by(CauseKind::fragmentation);
  report.devices[0].reason = Reason{.id = "fragmentation", .text = "what is free lies in pieces"};
  report.devices[0].besides =
      Advice{.reason = {.id = "kept_tensors", .text = "list 'all' keeps them", .fix = "results_to_host"},
             .fixes = {{.id = "results_to_host", .label = "results on the host", .predicted_peak_bytes = kGiB}}};
  const Report failed = report;
  take_whole_run(report, whole_run(13 * kGiB));
  CHECK(report.devices[0].reason->id == "kept_tensors");
  CHECK(report.devices[0].fixes[0].id == "results_to_host");

  Report again = failed;  // from the trace, once more
  keep_measured(again, report);
  CHECK(again.devices[0].reason->id == "kept_tensors");

  report = failed;
  take_whole_run(report, whole_run(10 * kGiB));
  CHECK(report.devices[0].reason->id == "fragmentation");

  report = failed;
  std::swap(*report.devices[0].reason, report.devices[0].besides->reason);  // nearly full
  take_whole_run(report, whole_run(13 * kGiB));
  CHECK(report.devices[0].reason->id == "kept_tensors");
}

TEST_CASE("where the whole run would fit, fragmentation stays the cause and its fix stays first", "[report]") {
  Report report = failed_by(CauseKind::fragmentation);
  take_whole_run(report, whole_run(10 * kGiB));
  CHECK(report.devices[0].cause->kind == CauseKind::fragmentation);
  REQUIRE(report.devices[0].fixes.size() == 2);
  CHECK(report.devices[0].fixes[0].id == "expandable_segments");
  CHECK(report.devices[0].fixes[0].predicted_peak_bytes == 10 * kGiB);
}

TEST_CASE("a program that takes a share of its GPU shows nothing on a larger one", "[report]") {
  Report report = failed_by(CauseKind::fragmentation);
  const Report before = report;
  take_whole_run(report, whole_run(14000 * kGiB));
  CHECK(report == before);
}

TEST_CASE("what grows without end has no whole run", "[report]") {
  Report report = failed_by(CauseKind::leak);
  const Report before = report;
  take_whole_run(report, whole_run(13 * kGiB));
  CHECK(report == before);
}

TEST_CASE("a report that is made anew keeps what other runs have shown", "[report]") {
  Report earlier = failed_by(CauseKind::fragmentation);
  take_whole_run(earlier, whole_run(13 * kGiB));
  earlier.devices[0].fixes[0].measured_peak_bytes = 6 * kGiB;
  Report anew = failed_by(CauseKind::fragmentation);
  keep_measured(anew, earlier);
  CHECK(anew.devices[0].cause->kind == CauseKind::capacity);
  CHECK(anew.devices[0].fixes == earlier.devices[0].fixes);
}

}  // namespace oomdiag
