#pragma once

#include <nccl.h>

namespace oomdiag {

/// Splits a communicator as ncclCommSplit does. In a group `comm` is made when the group ends, else at once. `config` may be
/// null.
ncclResult_t split_communicator(ncclComm_t parent, int color, int key, ncclComm_t* comm, const ncclConfig_t* config);

}  // namespace oomdiag
