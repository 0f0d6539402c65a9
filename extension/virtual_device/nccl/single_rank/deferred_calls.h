#pragma once

#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/transfer.h"

// What a single rank takes for what it receives in a group: from a rank what it sends to that rank in the same group, and of
// what others broadcast what it broadcasts itself. So an all-to-all and an all-gather that are made of such calls answer as
// if all ranks were alike.

namespace oomdiag {

inline constexpr int kAllRanks = -1;

/// A message or a broadcast.
struct DeferredCall {
  ncclComm_t comm = nullptr;
  int peer = 0;                ///< or kAllRanks: a broadcast
  const void* from = nullptr;  ///< of a send
  void* to = nullptr;          ///< of a receipt
  Incoming incoming{};
  ncclDataType_t type = ncclInt8;
  bool is_done = false;
};

/// Keeps the call until the group ends. False, and nothing is kept, where no group is open or the other ranks are there.
bool defer_to_group_end(const DeferredCall& call);

/// A model's numbers go to or come from one other rank: the communicator's ranks are stages, which is written once.
void write_stages_once(ncclComm& comm, ncclDataType_t type);

}  // namespace oomdiag
