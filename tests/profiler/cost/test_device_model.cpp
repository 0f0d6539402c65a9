#include "profiler/cost/device_model.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

constexpr DeviceFacts kRtx3090{8, 6, 82, 1695000, 9751000, 384, true};

double teraflops(const DeviceRates& rates, WorkPrecision precision) {
  return rates.flops_per_second[static_cast<size_t>(precision)] / 1e12;
}

bool is_near(double value, double expected) { return value > 0.99 * expected && value < 1.01 * expected; }

}  // namespace

TEST_CASE("rates derived from a card's facts are those that are published", "[cost]") {
  const DeviceRates rtx3090 = derive_rates(kRtx3090);
  CHECK(is_near(teraflops(rtx3090, WorkPrecision::fp32), 35.6));
  CHECK(is_near(teraflops(rtx3090, WorkPrecision::fp16), 71.2));
  CHECK(is_near(rtx3090.bytes_per_second / 1e9, 936));
  const DeviceRates rtx4090 = derive_rates({8, 9, 128, 2520000, 10501000, 384, true});
  CHECK(is_near(teraflops(rtx4090, WorkPrecision::bf16), 165.2));
  const DeviceRates a100 = derive_rates({8, 0, 108, 1410000, 1512000, 5120, false});
  CHECK(is_near(teraflops(a100, WorkPrecision::bf16), 312));
  CHECK(is_near(teraflops(a100, WorkPrecision::fp32), 19.5));
}

TEST_CASE("the least time is that of what takes longest", "[cost]") {
  const DeviceRates rates{.flops_per_second = {1e12, 4e12, 0, 0, 0}, .bytes_per_second = 1e11};
  const LeastTime compute = least_time({.flops = {2'000'000'000}, .memory_bytes = 1000, .launches = 1}, rates);
  CHECK(compute.ns == 2'000'000);
  CHECK(compute.bound_by == BoundBy::compute);
  const LeastTime memory = least_time({.flops = {1000}, .memory_bytes = 100'000'000, .launches = 1}, rates);
  CHECK(memory.ns == 1'000'000);
  CHECK(memory.bound_by == BoundBy::memory);
  const LeastTime launches = least_time({.memory_bytes = 8, .launches = 10}, rates);
  CHECK(launches.ns == 40'000);
  CHECK(launches.bound_by == BoundBy::launches);
}

TEST_CASE("a rate that is not known gives no time", "[cost]") {
  const DeviceRates rates{.flops_per_second = {1e12, 0, 0, 0, 0}, .bytes_per_second = 1e11};
  CHECK(least_time({.flops = {0, 5}, .memory_bytes = 8, .launches = 1}, rates).ns == 0);
  CHECK(least_time({.memory_bytes = 8, .launches = 1}, derive_rates({6, 1, 20, 1, 1, 1, false})).ns == 0);
}
