#pragma once

#include <cuda.h>
#include <nccl.h>

#include <memory>
#include <vector>

#include "extension/virtual_device/nccl/connections.h"
#include "extension/virtual_device/nccl/mailbox.h"

// NCCL whose collectives return at once. What the host wrote (driver/contents.h) really goes from rank to rank, as far as
// the ranks run on one machine: the receiver gets a promise, and waits for the sender when its host looks (mailbox.h).
// Where a kernel should have written, and of reductions, this rank's own values are taken for all: ranks are alike. A
// communicator takes buffers of its GPU, outside of PyTorch's count, by an estimate (connections.h).

/// What the handle points at.
struct ncclComm {
  int count = 1;  ///< ranks
  int rank = 0;
  int device = 0;  ///< ordinal
  ncclUniqueId id{};
  int splits = 0;  ///< of this communicator so far, as every rank of it counts them
  std::unique_ptr<oomdiag::Connections> connections{};
  std::unique_ptr<oomdiag::Mailbox> mailbox{};  ///< of several ranks
  std::vector<uint64_t> received{};             ///< messages so far, by the rank that sent them
  std::vector<int> ranks{};       ///< its members' ranks in the whole job, of a single rank (single_rank/job.h)
  bool has_stages = false;        ///< and the job's file "stages" says so
  bool is_count_guessed = false;  ///< nobody said how many chose this rank's color (split.cpp)
};

namespace oomdiag {

/// A communicator of so many ranks, on the current device.
ncclResult_t make_communicator(ncclComm_t* handle, int count, int rank, const ncclUniqueId& id,
                               const ncclConfig_t* config);

/// ncclInvalidArgument where there is no such communicator, or it has no such rank. Every call that needs one begins with it.
inline ncclResult_t check(ncclComm_t comm, int rank = 0) {
  return comm && rank >= 0 && rank < comm->count ? ncclSuccess : ncclInvalidArgument;
}

/// That, and what connections.h has: before a collective, and before messages.
ncclResult_t join(ncclComm_t comm, Collective collective, int root = 0);
ncclResult_t reach(ncclComm_t comm, int rank);
/// … of all ranks but this one.
ncclResult_t reach_all(ncclComm_t comm);

}  // namespace oomdiag
