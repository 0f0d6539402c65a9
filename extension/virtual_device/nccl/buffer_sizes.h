#pragma once

#include <cstdint>
#include <string>

// What NCCL's connections take of a GPU, as an estimate: the virtual GPU measures no links. The sizes are those of NCCL's
// own settings (user guide, "Environment variables") and of its open source (src/transport/p2p.cc, net.cc, nvls.cc), and were
// held against what people measured: 14 MiB for each peer and channel is to the byte what an all-to-all of 8 H100 takes
// (32 channels, NVIDIA/nccl issue 1685: 3.28 GB), 12 and 6 MiB for ring and tree of 24 channels what groups of 2 and of more
// A100 differ by (issue 964: 144 MB), where memory was not yet mapped by the driver's virtual memory.
namespace oomdiag {

/// How ranks reach each other.
struct Topology {
  enum class Host : uint8_t {
    nvlink,
    pcie,          ///< the GPUs reach each other's memory
    shared_memory  ///< they do not, as GPUs for games: all goes through the host's
  };
  enum class Network : uint8_t {
    rdma,  ///< that reaches the GPU's memory
    tcp    ///< or whatever else goes through the host's
  };
  Host host = Host::nvlink;
  Network network = Network::rdma;
};

/// A communicator, seen from one of its ranks.
struct Group {
  int ranks = 1;
  int ranks_here = 1;    ///< on the same host, this one among them
  int architecture = 0;  ///< of its GPU, such as 90
};

/// NCCL's settings, by default as it has them.
struct NcclSettings {
  uint64_t simple_bytes = 4 << 20;        ///< NCCL_BUFFSIZE
  uint64_t ll_bytes = 512 << 10;          ///< NCCL_LL_BUFFSIZE
  uint64_t ll128_bytes = 4800 << 10;      ///< NCCL_LL128_BUFFSIZE
  uint64_t nvls_chunk_bytes = 128 << 10;  ///< NCCL_NVLS_CHUNKSIZE
  uint64_t net_chunk_bytes = 128 << 10;   ///< NCCL_P2P_NET_CHUNKSIZE
  uint64_t least_channels = 1;            ///< NCCL_MIN_CTAS
  uint64_t most_channels = 32;            ///< NCCL_MAX_CTAS
  uint64_t most_peer_channels = 32;       ///< NCCL_MAX_P2P_NCHANNELS
  uint64_t nvls_channels = 16;            ///< NCCL_NVLS_NCHANNELS
  bool nvls = true;                       ///< NCCL_NVLS_ENABLE
  bool maps_memory = true;                ///< NCCL_CUMEM_ENABLE
  bool connects_when_used = true;         ///< NCCL_RUNTIME_CONNECT
};

/// What each kind of connection takes, when it is first used.
struct BufferSizes {
  uint64_t ring = 0;       ///< at the first collective
  uint64_t tree = 0;       ///< more at the first all-reduce
  uint64_t multicast = 0;  ///< NVLS: more at the first reduction or gathering of all
  uint64_t peer_here = 0;  ///< at the first message to or from a rank of the host: of each
  uint64_t elsewhere = 0;  ///< at the first message to or from any other: of all together

  bool operator==(const BufferSizes&) const = default;
};

BufferSizes estimate_buffers(const Group& group, const Topology& topology, const NcclSettings& settings);

/// "24 channels over NVLink": the rule, for who reads the figure.
std::string describe_rule(const Group& group, const Topology& topology, const NcclSettings& settings);

/// "nvlink", "pcie" or "shm", and after a comma "rdma" or "tcp": what the text says is changed. False for anything else.
bool read_topology(const std::string& text, Topology& topology);

}  // namespace oomdiag
