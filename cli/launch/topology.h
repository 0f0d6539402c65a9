#pragma once

#include <string>

namespace oomdiag {

/// A host of a job and what lies between hosts, as the command line says it.
struct TopologyChoice {
  int gpus = 0;         ///< of a host; 0 = not said
  std::string gpu{};    ///< empty = not said
  std::string links{};  ///< for the virtual NCCL (OOMDIAG_TOPOLOGY): "nvlink,rdma"

  bool operator==(const TopologyChoice&) const = default;
};

/// "8xh100-nvlink,ib", "pcie", "4x-pcie,tcp", ",tcp": GPUs of a host and their kind, the links between them (nvlink, pcie,
/// shm) and between hosts (ib, roce, efa, rdma; tcp, ethernet). Throws Error(usage).
TopologyChoice read_topology(const std::string& text);

}  // namespace oomdiag
