#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/process/launcher.h"
#include "cli/python/install.h"

namespace CLI {
class App;
}

// One rank of a job, or some of them, each alone on a virtual host (extension/virtual_device/nccl/single_rank/job.h).

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

/// What the command line says of the job.
struct RankOptions {
  int world_size = 0;  ///< 0 = the program is no rank of a job, or knows that itself
  int rank = -1;
  std::string ranks{};  ///< "0,7,63" or "distinct"
  int local_world_size = 0;
  std::string topology{};  ///< as of read_topology()

  bool is_job() const { return world_size > 0; }
  TopologyChoice hosts() const { return topology.empty() ? TopologyChoice{} : read_topology(topology); }
  bool operator==(const RankOptions&) const = default;
};

/// Adds --world-size, --rank, --ranks, --local-world-size and --topology to a command.
void add_rank_options(CLI::App& command, RankOptions& options);

/// A job, and those of its ranks that are run.
struct Job {
  int world_size = 1;
  int local_world_size = 1;  ///< GPUs of a host
  std::vector<int> ranks{};  ///< ascending
  bool is_distinct = false;  ///< `ranks` is all that may differ; one of each kind is run
  TopologyChoice topology{};

  bool operator==(const Job&) const = default;
};

/// The rank of it that a program is run as.
struct SingleRank {
  Job job{};
  int number = 0;

  bool operator==(const SingleRank&) const = default;
};

/// What the options mean. A host has as many GPUs as `device_count`, or 8 where that is one. Throws Error(usage).
Job choose_job(const RankOptions& options, int device_count);

/// What --topology says of the device. Throws Error(usage) where both name a GPU.
DeviceOptions device_of(const Job& job, DeviceOptions device);

/// Adds --local-world-size and --topology to a command.
void add_host_options(CLI::App& command, RankOptions& options);

/// The host of the job: each of its GPUs. Throws Error(usage) if it has too few GPUs.
VirtualHost host_of(const Job& job, VirtualHost host);
/// Throws Error(usage) for a real GPU too.
VirtualHost host_of(const Job& job, const DeviceChoice& choice);

/// The variables of a rank as torchrun sets them, and those of ours. `folder` is that of its job: an own one for each run,
/// which must be there as long as the program runs.
Environment environment_of_rank(const SingleRank& rank, const std::filesystem::path& folder, const Install& install);

/// The ranks of the first pipeline that the rank was in, as it wrote in the folder of its job; empty where there is
/// none.
std::vector<int> read_stages(const std::filesystem::path& folder);

}  // namespace oomdiag
