#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/report/make/limitations.h"
#include "tests/catch.h"

using namespace oomdiag;

namespace {

/// The limitations of a report on a GPU of 12 GiB with so much managed memory, of which PyTorch reserved so much.
std::vector<std::string> limits_with(int64_t managed_bytes, int64_t reserved_bytes) {
  Trace trace;
  trace.devices.emplace_back().total_bytes = int64_t{12} << 30;
  History history;
  DeviceHistory& device = history.devices.emplace_back();
  device.reserved_known = true;
  device.state.reserved_bytes = reserved_bytes;
  device.state.non_pytorch_bytes = int64_t{1} << 30;
  device.state.host_memory.push_back({.owner = "libcudart.so.13", .kind = "managed", .bytes = managed_bytes});
  return list_limitations(trace, history, {});
}

bool speaks_of_managed_memory(const std::vector<std::string>& limits, std::string_view amount) {
  return std::ranges::any_of(limits, [&](const std::string& limit) {
    return limit.find(std::string(amount) + " of managed memory do not fit the GPU") != std::string::npos;
  });
}

}  // namespace

TEST_CASE("managed memory beyond the GPU is a limitation, with its bytes", "[report]") {
  CHECK(speaks_of_managed_memory(limits_with(int64_t{20} << 30, 0), "9.00 GiB"));
  CHECK(speaks_of_managed_memory(limits_with(int64_t{20} << 30, int64_t{21} << 30), "10.00 GiB"));
  CHECK_FALSE(speaks_of_managed_memory(limits_with(int64_t{8} << 30, int64_t{9} << 30), ""));
  CHECK_FALSE(speaks_of_managed_memory(limits_with(0, int64_t{13} << 30), ""));
}
