#pragma once

#include <cuda.h>
#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "extension/virtual_device/nccl/buffer_sizes.h"

namespace oomdiag {

enum class Collective : uint8_t { all_reduce, reduction_or_gathering, other };

/// The connections of a communicator: buffers on its GPU, taken when they are first used, as NCCL does (NCCL_RUNTIME_CONNECT;
/// with 0 there, all at once), and given back with it.
class Connections {
 public:
  /// `ranks`: of its members in the whole job, of a single rank (single_rank/job.h); else all are on this host. `config` may be null.
  Connections(int count, int rank, int device, const std::vector<int>& ranks, const ncclConfig_t* config);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  /// Before a collective; ncclUnhandledCudaError where the GPU has too little memory.
  ncclResult_t join(Collective collective);
  /// Before a message to or from that rank of the communicator; ncclInvalidArgument where it has none.
  ncclResult_t reach(int rank);
  /// What they take.
  uint64_t bytes() const { return bytes_; }

 private:
  ncclResult_t allocate(uint64_t& requested);

  BufferSizes sizes_;        ///< what is not taken yet
  std::vector<bool> here_;   ///< by rank: on this host
  std::vector<bool> known_;  ///< by rank: reached before
  int device_;
  std::string rule_;  ///< empty once it was noted
  std::vector<CUdeviceptr> blocks_;
  uint64_t bytes_ = 0;
};

}  // namespace oomdiag
