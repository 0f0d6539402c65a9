#include <cmath>

#include "profiler/cost/communication.h"
#include "profiler/cost/step_work.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

constexpr double kMs = 1e6;

DeviceRates hopper() {
  DeviceRates rates{.memory_bytes = 1'000'000'000'000,
                    .bus_bytes = 63'000'000'000,
                    .nvlink_bytes = 450'000'000'000,
                    .multiprocessors = 132,
                    .capability_major = 9};
  rates.flops[static_cast<size_t>(WorkPrecision::fp32)] = 1'000'000'000'000;
  return rates;
}

Communication call_of(const std::string& name, int64_t bytes, int64_t ranks, int64_t stride = 1) {
  return {.name = name, .bytes = bytes, .ranks = ranks, .stride = stride};
}

double milliseconds(const Communication& call, std::string_view links = {}, int64_t ranks_per_host = 8) {
  return communication_ns(call, links_of(hopper(), links, ranks_per_host)).value() / kMs;
}

bool is_near(double value, double expected) { return std::abs(value - expected) < 0.01 * expected; }

/// A step with one product, beside which a collective runs or waits.
StepWork step_with(bool is_waited_for) {
  const std::string text =
      "steps\t2\njob\t8 nvlink,rdma\n"
      "1\tforward\t3\taten::relu\t1\tFloat:4:1000000000 > Float:4:1000000000\n"
      "1\tbackward\t3\tnccl::allreduce\t2\tlist:Float:1:1000000000:0 i:8 i:1 i:" +
      std::string(is_waited_for ? "1" : "0") +
      " > list:Float:1:1000000000:0\n"
      "1\tbackward\t3\taten::relu\t1\tFloat:4:1000000000 > Float:4:1000000000\n";
  const DeviceRates rates = hopper();
  return work_of_last_step(parse_metered_run(text), &rates, true).value();
}

}  // namespace

TEST_CASE("what a rank sends is counted as nccl-tests counts it", "[cost]") {
  CHECK(call_of("allreduce", 800, 4).bytes_on_links() == 1200);
  CHECK(call_of("all_reduce", 800, 4).bytes_on_links() == 1200);
  CHECK(call_of("_allgather_base", 800, 4).bytes_on_links() == 600);
  CHECK(call_of("allGatherSingleImpl", 800, 4).bytes_on_links() == 600);
  CHECK(call_of("reduceScatterSingleImpl", 800, 4).bytes_on_links() == 600);
  CHECK(call_of("_reduce_scatter_base", 800, 8).bytes_on_links() == 700);
  CHECK(call_of("all_to_all", 800, 2).bytes_on_links() == 400);
  CHECK(call_of("broadcast", 800, 4).bytes_on_links() == 800);
}

TEST_CASE("a collective is read from its line: tensors, ranks, distance, whether it is waited for", "[cost]") {
  const auto call = communication_of(parse_metered_operator(
      "1\tforward\t2\tnccl::_allgather_base\t3\tlist:BFloat16:1:1000:0 i:16 i:8 i:0 > list:BFloat16:1:16000:0"));
  REQUIRE(call.has_value());
  CHECK(call->bytes == 16000);
  CHECK(call->ranks == 16);
  CHECK(call->stride == 8);
  CHECK(!call->is_waited_for);
  CHECK(!communication_of(parse_metered_operator("1\tforward\t2\taten::relu\t1\tFloat:4:10 > Float:4:10")));
}

TEST_CASE("a group is as fast as its slowest link, and hosts use the network GPUs of all its ranks", "[cost]") {
  constexpr int64_t kGigabyte = 1'000'000'000;
  const double on_host = milliseconds(call_of("_allgather_base", 8 * kGigabyte, 8));
  CHECK(is_near(on_host, 7.0 / 360 * 1000));
  const double over_pcie = milliseconds(call_of("_allgather_base", 8 * kGigabyte, 8), "pcie");
  CHECK(is_near(over_pcie, 7.0 / (0.63 * 63) * 1000));
  const double two_hosts = milliseconds(call_of("_allgather_base", 16 * kGigabyte, 16));
  CHECK(is_near(two_hosts, 15.0 / 360 * 1000));  // 8 x 47 GB/s are more than NVLink
  const double one_of_each_host = milliseconds(call_of("_allgather_base", 2 * kGigabyte, 2, 8));
  CHECK(is_near(one_of_each_host, 1.0 / 47 * 1000));
  CHECK(milliseconds(call_of("_allgather_base", 16 * kGigabyte, 16), "nvlink,tcp") > 10 * two_hosts);
}

TEST_CASE("of collectives beside which more is computed one counts, of those that are waited for all", "[cost]") {
  const StepWork beside = step_with(false), waiting = step_with(true);
  CHECK(beside.all.collectives == 2);
  CHECK(beside.all.link_bytes == 3'500'000'000);
  CHECK(beside.exposed_communication_ns() == beside.all.overlapped_ns / 2);
  CHECK(waiting.exposed_communication_ns() == waiting.all.waited_for_ns);
  CHECK(waiting.step_ns() > beside.step_ns());
}

TEST_CASE("a rank alone in its group sends nothing, and without a known link there is no time", "[cost]") {
  CHECK(communication_ns(call_of("allreduce", 1000, 1), {}) == 0);
  CHECK(!communication_ns(call_of("allreduce", 1000, 2), {}));
}
