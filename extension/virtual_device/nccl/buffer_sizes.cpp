#include "extension/virtual_device/nccl/buffer_sizes.h"

#include <algorithm>

namespace oomdiag {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kPage = 2 * kMiB;     // what the driver maps at least
constexpr uint64_t kSteps = 8;           // of a buffer: NCCL_STEPS
constexpr uint64_t kSharedSteps = 16;    // of a buffer that connections over the network share: NCCL_SHARED_STEPS
constexpr int kFirstWithMulticast = 90;  // Hopper
constexpr int kFirstWithManyLinks = 80;  // Ampere: twelve links of NVLink

uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

bool has_others_elsewhere(const Group& group) { return group.ranks > group.ranks_here; }

uint64_t count_channels(const Group& group, const Topology& topology, const NcclSettings& settings) {
  uint64_t channels = 2;
  if (topology.host == Topology::Host::nvlink) {
    channels = group.architecture >= kFirstWithManyLinks ? 24 : 12;
    if (has_others_elsewhere(group)) channels = 16;  // two for each of eight network GPUs
  }
  return std::clamp(channels, settings.least_channels, std::max(settings.least_channels, settings.most_channels));
}

uint64_t count_peer_channels(const Topology& topology, const NcclSettings& settings) {
  return std::min<uint64_t>(topology.host == Topology::Host::nvlink ? 32 : 2, settings.most_peer_channels);
}

/// Both directions of one channel between two GPUs of a host: buffers of all protocols where it arrives, a page where it
/// begins, and one of the mapping.
uint64_t pair_in_host(const Topology& topology, const NcclSettings& settings) {
  if (topology.host == Topology::Host::shared_memory) return 0;
  const uint64_t arriving = whole_pages(settings.simple_bytes + settings.ll_bytes + settings.ll128_bytes);
  return arriving + kPage + (settings.maps_memory ? kPage : 0);
}

/// The same between hosts: what leaves waits on the GPU, too, but for the shortest messages.
uint64_t pair_between_hosts(const Topology& topology, const NcclSettings& settings) {
  if (topology.network == Topology::Network::tcp) return 0;
  return whole_pages(settings.simple_bytes + settings.ll_bytes + settings.ll128_bytes) +
         whole_pages(settings.simple_bytes + settings.ll128_bytes);
}

}  // namespace

BufferSizes estimate_buffers(const Group& group, const Topology& topology, const NcclSettings& settings) {
  if (group.ranks < 2) return {};
  const uint64_t channels = count_channels(group, topology, settings);
  const uint64_t peer_channels = count_peer_channels(topology, settings);
  const auto here = static_cast<uint64_t>(std::max(1, group.ranks_here));
  const uint64_t in_host = pair_in_host(topology, settings), between = pair_between_hosts(topology, settings);

  // Each channel's ring comes into a host and leaves it once, at another GPU each.
  uint64_t pair = in_host;
  if (has_others_elsewhere(group)) pair = ((here - 1) * in_host + between) / here;
  BufferSizes sizes{.ring = channels * pair, .tree = group.ranks > 2 ? channels * pair / 2 : 0};

  const bool is_multicast = settings.nvls && topology.host == Topology::Host::nvlink && here > 2;
  if (is_multicast && group.architecture >= kFirstWithMulticast) {
    sizes.multicast = settings.nvls_channels * 2 * kSteps * settings.nvls_chunk_bytes * here;
  }
  sizes.peer_here = here > 1 ? peer_channels * in_host : 0;
  if (has_others_elsewhere(group) && topology.network == Topology::Network::rdma) {
    sizes.elsewhere = 2 * peer_channels * kSharedSteps * settings.net_chunk_bytes;
  }
  return sizes;
}

std::string describe_rule(const Group& group, const Topology& topology, const NcclSettings& settings) {
  std::string rule = std::to_string(count_channels(group, topology, settings)) + " channels";
  if (group.ranks_here > 1 && topology.host == Topology::Host::nvlink) rule += " over NVLink";
  if (group.ranks_here > 1 && topology.host == Topology::Host::pcie) rule += " over PCIe";
  if (group.ranks_here > 1 && topology.host == Topology::Host::shared_memory) rule += " through the host's memory";
  if (!has_others_elsewhere(group)) return rule;
  if (group.ranks_here > 1) rule += " and";
  return rule + (topology.network == Topology::Network::rdma ? " over RDMA" : " over TCP");
}

bool read_topology(const std::string& text, Topology& topology) {
  const size_t comma = text.find(',');
  const std::string host = text.substr(0, comma), network = comma == text.npos ? "" : text.substr(comma + 1);
  using Host = Topology::Host;
  using Network = Topology::Network;
  if (host == "nvlink") topology.host = Host::nvlink;
  if (host == "pcie") topology.host = Host::pcie;
  if (host == "shm") topology.host = Host::shared_memory;
  if (network == "rdma") topology.network = Network::rdma;
  if (network == "tcp") topology.network = Network::tcp;
  const bool is_host = host.empty() || host == "nvlink" || host == "pcie" || host == "shm";
  return is_host && (network.empty() || network == "rdma" || network == "tcp");
}

}  // namespace oomdiag
