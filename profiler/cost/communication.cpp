#include "profiler/cost/communication.h"

#include <algorithm>
#include <bit>

#include "profiler/cost/metered_operator.h"
#include "profiler/cost/time_model.h"
#include "profiler/one_of.h"

namespace oomdiag {
namespace {

constexpr std::string_view kCollective = "nccl::";

// Shares of the bandwidth of a link that NCCL reaches with large messages, and where they were published (repository and issue):
constexpr double kOfNvlink =
    0.8;  // 370 of 450 GB/s, H100 (NVIDIA/nccl-tests#212); about 230 of 300, A100 (NVIDIA/nccl-tests#100)
constexpr double kOfBus = 0.63;      // 20 of 31.5 GB/s, A100 over PCIe 4.0 (NVIDIA/nccl-tests#178)
constexpr double kOfNetwork = 0.94;  // 46 to 48 of 50 GB/s, InfiniBand NDR (NVIDIA/nccl-tests#290)
constexpr double kOfNvlinkSharp =
    1.06;  // an all-reduce counts for more than its switches pass on: 475 to 480 of 450 GB/s (#212, #272)

constexpr int64_t kAmpereNetwork = 25'000'000'000;   // 200 Gb/s for each GPU, as DGX A100 has it
constexpr int64_t kHopperNetwork = 50'000'000'000;   // 400 Gb/s, DGX H100
constexpr int64_t kEthernetOfHost = 12'500'000'000;  // 100 Gb/s for all GPUs of a host

// Of a message without bytes: the start of the kernel on all ranks, and a step of the tree between hosts. The order of what nccl-tests
// prints for small messages (20 to 40 us), not fitted.
constexpr double kStartNs = 20'000;
constexpr double kStepBetweenHostsNs = 10'000;

int64_t bytes_of(const std::vector<WorkValue>& values) {
  int64_t bytes = 0;
  for (const WorkValue& value : values) bytes += value.bytes;
  return bytes;
}

// As ProcessGroupNCCL of one version of torch or another calls them: "allreduce", "all_reduce"; "_reduce_scatter_base",
// "reduceScatterSingleImpl"; "_allgather_base", "allGatherSingleImpl".
bool is_all_reduce(const Communication& call) {
  return contains_one_of(call.name, {"allreduce", "all_reduce", "allReduce"});
}

bool has_own_part(const Communication& call) {
  return contains_one_of(call.name, {"gather", "Gather", "scatter", "Scatter", "all_to_all", "alltoall", "allToAll"});
}

int64_t hosts_of(const Communication& call, const Links& links) {
  const int64_t on_host = links.ranks_per_host > 0 ? links.ranks_per_host : call.ranks * call.stride;
  return ((call.ranks - 1) * call.stride + on_host) / on_host;
}

}  // namespace

double Communication::bytes_on_links() const {
  const double all = static_cast<double>(bytes),
               of_others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  if (is_all_reduce(*this)) return 2 * of_others * all;
  if (has_own_part(*this)) return of_others * all;
  return all;
}

std::optional<Communication> communication_of(const MeteredOperator& metered) {
  if (!metered.name.starts_with(kCollective)) return std::nullopt;
  std::vector<int64_t> numbers;
  for (const WorkValue& value : metered.inputs) {
    if (value.kind == WorkValue::Kind::number) numbers.push_back(value.values.front());
  }
  constexpr size_t kNumbers = 3;  // ranks, stride, is_waited_for: extension/record/work_meter.cpp
  if (numbers.size() != kNumbers) return std::nullopt;
  return Communication{.name = metered.name.substr(kCollective.size()),
                       .bytes = std::max(bytes_of(metered.inputs), bytes_of(metered.outputs)),
                       .ranks = std::max<int64_t>(numbers[0], 1),
                       .stride = std::max<int64_t>(numbers[1], 1),
                       .is_waited_for = numbers[2] != 0};
}

Links links_of(const DeviceRates& rates, std::string_view links, int64_t ranks_per_host) {
  constexpr int kHopper = 9;
  const bool has_nvlink = rates.nvlink_bytes > 0 && !contains(links, "pcie") && !contains(links, "shm");
  Links between{.ranks_per_host = ranks_per_host};
  between.host_bytes = static_cast<int64_t>(has_nvlink ? kOfNvlink * static_cast<double>(rates.nvlink_bytes)
                                                       : kOfBus * static_cast<double>(rates.bus_bytes));
  between.reduces_in_switch = has_nvlink && rates.capability_major >= kHopper;
  const int64_t rdma = rates.capability_major >= kHopper ? kHopperNetwork : kAmpereNetwork;
  const int64_t network = contains(links, "tcp") ? kEthernetOfHost / std::max<int64_t>(ranks_per_host, 1) : rdma;
  between.network_bytes = static_cast<int64_t>(kOfNetwork * static_cast<double>(network));
  return between;
}

std::optional<double> communication_ns(const Communication& call, const Links& links) {
  if (call.ranks < 2) return 0;
  const int64_t hosts = hosts_of(call, links);
  auto rate = static_cast<double>(links.host_bytes);
  if (hosts == 1 && is_all_reduce(call) && links.reduces_in_switch) rate *= kOfNvlinkSharp / kOfNvlink;
  if (hosts > 1) {  // all ranks of the group that share a host send over their own network GPUs
    const auto beside = static_cast<double>(std::max<int64_t>(1, links.ranks_per_host / call.stride));
    const double network = beside * static_cast<double>(links.network_bytes);
    rate = beside > 1 ? std::min(rate, network) : network;
  }
  if (rate <= 0) return std::nullopt;
  const auto steps = static_cast<double>(std::bit_width(static_cast<uint64_t>(hosts - 1)));
  return kStartNs + kStepBetweenHostsNs * steps + 1e9 * call.bytes_on_links() / rate;
}

}  // namespace oomdiag
