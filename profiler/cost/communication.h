#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "profiler/cost/metered_operator.h"
#include "profiler/cost/time_model.h"

// How long the collectives of a job take on its links: the bytes that each rank sends, over the bandwidth of the slowest link
// of its group (docs/cost.md).
namespace oomdiag {

/// A call of NCCL, as one rank makes it.
struct Communication {
  std::string name{};         ///< "all_reduce", as ProcessGroupNCCL calls it
  int64_t bytes = 0;          ///< of its larger side: what a gather puts together, what a reduction starts from
  int64_t ranks = 1;          ///< of its group
  int64_t stride = 1;         ///< between neighbours of the group, in ranks of the job
  bool is_waited_for = true;  ///< the next operator waits for it; false: it runs beside what is computed meanwhile

  /// What a rank sends on the links, as nccl-tests counts it for its "bus bandwidth" (doc/PERFORMANCE.md there).
  double bytes_on_links() const;
};

/// None of an operator that is no call of NCCL.
std::optional<Communication> communication_of(const MeteredOperator& metered);

/// What lies between the ranks of a job.
struct Links {
  int64_t ranks_per_host = 0;      ///< 0: all are on one
  int64_t host_bytes = 0;          ///< that a rank sends in a second to others of its host; 0 = not known
  int64_t network_bytes = 0;       ///< that a rank sends in a second to other hosts
  bool reduces_in_switch = false;  ///< NVLink SHARP: the switches of a host add up what they pass on
};

/// `links`: as --topology has them ("nvlink,rdma"), empty = what machines with such GPUs have.
Links links_of(const DeviceRates& rates, std::string_view links, int64_t ranks_per_host);

/// None where the bandwidth of a link that it needs is not known.
std::optional<double> communication_ns(const Communication& call, const Links& links);

}  // namespace oomdiag
