#include "profiler/report/json/json.h"
#include "profiler/report/make/job.h"
#include "profiler/report/text/text.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

JobMember member(int rank, int64_t peak_bytes, uint64_t start_time_ns = 0) {
  JobMember one{
      .report = {}, .folder = "rank-" + std::to_string(rank), .pid = 100 + rank, .start_time_ns = start_time_ns};
  one.report.rank = rank;
  one.report.world_size = 3;
  ReportOfDevice device;
  device.device = {0, "Test GPU", true, 16_GiB, "9.0"};
  device.peak.allocated_bytes = device.peak.reserved_bytes = peak_bytes;
  one.report.devices.push_back(device);
  return one;
}

JobMember failed(JobMember one, int64_t time_ns) {
  one.report.outcome = "out_of_memory";
  one.report.devices[0].failure = ReportFailure{.phase = Phase::backward, .step = 3, .time_ns = time_ns};
  return one;
}

}  // namespace

TEST_CASE("a job is reported by the rank that failed first, whenever its recording began", "[report]") {
  const Report job =
      merge_job({member(0, 1_GiB), failed(member(1, 2_GiB, 5'000), 1'000), failed(member(2, 3_GiB, 1'000), 2'000)}, 1);
  CHECK(job.rank == 2);
  CHECK(job.outcome == "out_of_memory");
  CHECK(job.exit_code == 1);
}

TEST_CASE("without a failure it is reported by the fullest, and ends as the job ended", "[report]") {
  CHECK(merge_job({member(0, 1_GiB), member(1, 2_GiB)}, 0).rank == 1);
  CHECK(merge_job({member(0, 1_GiB), member(1, 2_GiB)}, 7).outcome == "failed");
  CHECK(merge_job({member(0, 1_GiB), member(1, 2_GiB)}, 143).outcome == "killed");
}

TEST_CASE("ranks are listed in their order, processes beside them last", "[report]") {
  JobMember beside = member(0, 8_GiB);
  beside.report.world_size = 1;
  const Report job = merge_job({beside, member(2, 1_GiB), member(1, 1_GiB)}, 0);
  REQUIRE(job.ranks.size() == 3);
  CHECK(job.ranks[0].rank == 1);
  CHECK(job.ranks[1].rank == 2);
  CHECK_FALSE(job.ranks[2].rank);
  CHECK_FALSE(job.imbalance);  // what is no rank is compared with none
}

TEST_CASE("a rank's helpers have its number, and are no ranks", "[report]") {
  JobMember helper = member(1, 0);
  helper.pid = 200;
  const Report job = merge_job({member(0, 4_GiB), helper, member(1, 4_GiB), member(2, 4_GiB)}, 0);
  REQUIRE(job.ranks.size() == 4);
  CHECK(job.ranks[1].pid == 101);
  CHECK_FALSE(job.ranks[3].rank);
  CHECK(job.ranks[3].pid == 200);
  CHECK_FALSE(job.imbalance);
  CHECK(to_text(job).find("process 200") == std::string::npos);  // it holds nothing

  const Report alone = merge_job({helper, member(1, 4_GiB)}, 0);
  CHECK_FALSE(alone.imbalance);
  CHECK(to_text(alone).find("processes, ") == std::string::npos);
}

TEST_CASE("a rank that needs clearly more than the others is an imbalance", "[report]") {
  CHECK_FALSE(merge_job({member(0, 4_GiB), member(1, 4_GiB + 100_MiB)}, 0).imbalance);
  CHECK(merge_job({member(0, 4_GiB), member(1, 6_GiB), member(2, 4_GiB)}, 0).imbalance ==
        ReportImbalance{.rank = 1, .peak_bytes = 6_GiB, .median_of_others_bytes = 4_GiB, .difference_bytes = 2_GiB});
}

TEST_CASE("a rank that ran out where an even share would have fitted is blamed on imbalance", "[report]") {
  const auto job_with = [](int64_t other_bytes, PhasePeak reached) {
    JobMember full = failed(member(1, 15_GiB), 10);
    ReportOfDevice& device = full.report.devices[0];
    device.failure->requested_bytes = 2_GiB;
    device.cause = ReportCause{.kind = CauseKind::capacity, .short_by_bytes = 1_GiB};
    device.cause->evidence = {
        .requested_bytes = 1_GiB, .segment_bytes = 1_GiB, .total_bytes = 16_GiB, .allowed_bytes = 16_GiB};
    device.memory = {.allocated_bytes = 15_GiB, .free_bytes = 1_GiB};
    JobMember other = member(0, other_bytes);
    other.report.devices[0].phases = {reached};
    return merge_job({other, full}, 1);
  };
  const Report job = job_with(4_GiB, {3, Phase::backward, 4_GiB});
  CHECK(job.devices.at(0).cause->kind == CauseKind::imbalance);
  CHECK(job.ranks.at(1).cause == CauseKind::imbalance);
  CHECK(to_text(job).find("evenly spread it would fit") != std::string::npos);

  CHECK(job_with(14_GiB, {3, Phase::backward, 14_GiB}).devices.at(0).cause->kind == CauseKind::capacity);
  CHECK(job_with(4_GiB, {3, Phase::forward, 4_GiB}).devices.at(0).cause->kind ==
        CauseKind::capacity);  // did not come as far
}

TEST_CASE("a job survives its JSON and stands in its text", "[report]") {
  const Report job = merge_job({member(0, 4_GiB), failed(member(1, 6_GiB), 10)}, 1);
  CHECK(from_json(to_json(job)) == job);
  const std::string text = to_text(job);
  CHECK(text.find("rank 1                     6.00       6.00   out of memory in backward, step 3") != text.npos);
  CHECK(text.find("imbalance: rank 1 peaks 2.00 GiB above the others") != text.npos);
}

}  // namespace oomdiag
