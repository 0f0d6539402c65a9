#include "extension/virtual_device/nccl/connections.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "extension/environment.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/nccl/buffer_sizes.h"

namespace oomdiag {
namespace {

uint64_t setting(const char* name, uint64_t otherwise) {
  return static_cast<uint64_t>(variables::number(name, static_cast<int64_t>(otherwise)));
}

NcclSettings read_settings(const ncclConfig_t* config) {
  NcclSettings now;
  now.simple_bytes = setting("NCCL_BUFFSIZE", now.simple_bytes);
  now.ll_bytes = setting("NCCL_LL_BUFFSIZE", now.ll_bytes);
  now.ll128_bytes = setting("NCCL_LL128_BUFFSIZE", now.ll128_bytes);
  now.nvls_chunk_bytes = setting("NCCL_NVLS_CHUNKSIZE", now.nvls_chunk_bytes);
  now.net_chunk_bytes = setting("NCCL_P2P_NET_CHUNKSIZE", now.net_chunk_bytes);
  now.least_channels = setting("NCCL_MIN_CTAS", setting("NCCL_MIN_NCHANNELS", now.least_channels));
  now.most_channels = setting("NCCL_MAX_CTAS", setting("NCCL_MAX_NCHANNELS", now.most_channels));
  now.most_peer_channels = setting("NCCL_MAX_P2P_NCHANNELS", now.most_peer_channels);
  now.nvls_channels = setting("NCCL_NVLS_NCHANNELS", now.nvls_channels);
  now.nvls = setting("NCCL_NVLS_ENABLE", 1) != 0;
  now.maps_memory = setting("NCCL_CUMEM_ENABLE", 1) != 0;
  now.connects_when_used = setting("NCCL_RUNTIME_CONNECT", 1) != 0;
  if (config && config->minCTAs > 0) now.least_channels = static_cast<uint64_t>(config->minCTAs);
  if (config && config->maxCTAs > 0) now.most_channels = static_cast<uint64_t>(config->maxCTAs);
  return now;
}

/// As machines with such GPUs are built, unless the user says otherwise (oomdiag run --topology).
Topology read_machine(int device) {
  Topology topology;
  const bool reaches = oomdiag_device_has_peers(device);
  topology.host = reaches ? Topology::Host::pcie : Topology::Host::shared_memory;
  if (oomdiag_device_is_linked(device)) topology.host = Topology::Host::nvlink;
  topology.network = reaches ? Topology::Network::rdma : Topology::Network::tcp;
  const char* text = variables::text(variables::kTopology);
  if (*text != '\0' && !read_topology(text, topology))
    oomdiag_device_note("settings", "OOMDIAG_TOPOLOGY is not understood");
  return topology;
}

std::vector<bool> find_those_here(int count, int rank, const std::vector<int>& ranks) {
  std::vector<bool> here(static_cast<size_t>(count), true);
  const auto local = static_cast<int>(variables::number("LOCAL_WORLD_SIZE", 1));
  if (ranks.size() != here.size() || local < 1) return here;
  for (size_t i = 0; i < here.size(); ++i) here[i] = ranks[i] / local == ranks[static_cast<size_t>(rank)] / local;
  return here;
}

}  // namespace

Connections::Connections(int count, int rank, int device, const std::vector<int>& ranks, const ncclConfig_t* config)
    : here_(find_those_here(count, rank, ranks)), known_(here_.size(), false), device_(device) {
  const Group group{.ranks = count,
                    .ranks_here = static_cast<int>(std::count(here_.begin(), here_.end(), true)),
                    .architecture = oomdiag_device_architecture(device)};
  const NcclSettings settings = read_settings(config);
  const Topology topology = read_machine(device);
  sizes_ = estimate_buffers(group, topology, settings);
  rule_ = "NCCL's buffers (" + describe_rule(group, topology, settings) + ")";
  if (!settings.connects_when_used) join(Collective::all_reduce);
}

Connections::~Connections() {
  for (const CUdeviceptr block : blocks_) cuMemFree(block);
}

ncclResult_t Connections::allocate(uint64_t& requested) {
  if (requested == 0) return ncclSuccess;
  if (!rule_.empty())
    oomdiag_device_note("estimate", strdup(std::exchange(rule_, {}).c_str()));  // notes keep the pointer
  int before = 0;
  cudaGetDevice(&before);
  if (before != device_) cudaSetDevice(device_);
  CUdeviceptr block = 0;
  const CUresult error = cuMemAlloc(&block, requested);
  if (before != device_) cudaSetDevice(before);
  if (error == CUDA_ERROR_OUT_OF_MEMORY) oomdiag_device_note_oom(static_cast<int64_t>(requested));
  if (error) return ncclUnhandledCudaError;
  blocks_.push_back(block);
  bytes_ += std::exchange(requested, 0);
  return ncclSuccess;
}

ncclResult_t Connections::join(Collective collective) {
  if (const ncclResult_t error = allocate(sizes_.ring)) return error;
  if (collective == Collective::other) return ncclSuccess;
  if (const ncclResult_t error = allocate(sizes_.multicast)) return error;
  return collective == Collective::all_reduce ? allocate(sizes_.tree) : ncclSuccess;
}

ncclResult_t Connections::reach(int rank) {
  const auto index = static_cast<size_t>(rank);
  if (index >= known_.size()) return ncclInvalidArgument;
  if (known_[index]) return ncclSuccess;
  uint64_t of_peer = sizes_.peer_here;
  const ncclResult_t error = allocate(here_[index] ? of_peer : sizes_.elsewhere);
  if (!error) known_[index] = true;
  return error;
}

}  // namespace oomdiag
