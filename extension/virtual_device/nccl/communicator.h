#pragma once

#include <cuda.h>
#include <nccl.h>

// NCCL without neighbours. Each rank works as if the others had done their part: collectives return at once, and where
// their contents are known (driver/contents.h) the other ranks are taken to have sent what this rank sends. That is
// enough for what programs exchange to agree on, counts and shapes, because their ranks are alike. What is real is the
// memory: a communicator takes buffers of its card, outside of PyTorch's count, by an estimate.

/// What the handle points at.
struct ncclComm {
  int count = 1;  ///< ranks
  int rank = 0;
  int device = 0;  ///< ordinal
  ncclUniqueId id{};
  int splits = 0;  ///< of this communicator so far, as every rank of it counts them
  CUdeviceptr buffers = 0;
  uint64_t buffer_bytes = 0;
};

namespace oomdiag {

/// Whether a group is open on this thread (ncclGroupStart).
bool is_in_group() noexcept;

/// How a communicator was split: `count` ranks chose this rank's color, and this rank is `rank` among them.
struct SplitAnswer {
  int count = 0;
  int rank = 0;
};

/// Tells the other ranks of `parent` what this one chose and waits for what they did, by a file in the temporary folder.
/// False if they do not answer.
bool agree_on_split(const ncclComm& parent, int color, int key, SplitAnswer& answer);

}  // namespace oomdiag
