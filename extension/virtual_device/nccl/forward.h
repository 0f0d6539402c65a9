#pragma once

#include <functional>

#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/group.h"
#include "extension/virtual_device/nccl/transfer.h"
#include "extension/virtual_device/nccl/unique_id.h"
#include "extension/virtual_device/stubs/handle.h"

// What the lines of this library's entry_points.txt call, beside stubs/handle.h.

namespace oomdiag {

/// What a communicator says by one of its fields, or a function of it.
template <typename Read, typename Value>
ncclResult_t tell(Read read, ncclComm_t comm, Value* place) {
  if (const ncclResult_t error = check(comm)) return error;
  *place = std::invoke(read, *comm);
  return ncclSuccess;
}

inline ncclResult_t simulate_group(ncclSimInfo_t* info) {
  info->estimatedTime = 0;
  return close_group();
}

/// Splits a communicator as ncclCommSplit does. In a group `comm` is made when the group ends, else at once. `config` may be
/// null.
ncclResult_t split_communicator(ncclComm_t parent, int color, int key, ncclComm_t* comm, const ncclConfig_t* config);

inline ncclResult_t from_runtime(cudaError_t error) { return error ? ncclUnhandledCudaError : ncclSuccess; }

}  // namespace oomdiag
