#include "extension/virtual_device/nccl/single_rank/deferred_calls.h"

#include <algorithm>
#include <vector>

#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/group.h"
#include "extension/virtual_device/nccl/single_rank/job.h"
#include "extension/virtual_device/nccl/transfer.h"

namespace oomdiag {
namespace {

/// Of this thread's group. Leaked: a group may end while thread_local objects are destroyed (fork_and_exit.h).
std::vector<DeferredCall>& deferred() {
  static thread_local auto& calls = *new std::vector<DeferredCall>;
  return calls;
}

/// The first send of the group to the rank that this comes from, or the broadcast of this rank.
DeferredCall* find_counterpart(const DeferredCall& receipt) {
  auto& calls = deferred();
  const auto found = std::find_if(calls.begin(), calls.end(), [&](const DeferredCall& call) {
    return call.from && !call.is_done && call.comm == receipt.comm && call.peer == receipt.peer;
  });
  return found == calls.end() ? nullptr : &*found;
}

/// Whether this rank both sends to and receives from the call's peer.
bool is_exchange(const DeferredCall& call) {
  return std::ranges::any_of(deferred(), [&](const DeferredCall& other) {
    return other.peer == call.peer && (other.to != nullptr) != (call.to != nullptr);
  });
}

void receive_deferred(DeferredCall& receipt) {
  if (DeferredCall* sent = find_counterpart(receipt)) {
    sent->is_done = sent->peer != kAllRanks;
    receipt.incoming.is_asked_for = false;
    if (sent->incoming.bytes == receipt.incoming.bytes) receipt.incoming.own = sent->from;
  }
  receive(*receipt.comm, receipt.to, receipt.incoming);
}

ncclResult_t finish_calls() {
  auto& calls = deferred();
  for (const DeferredCall& call : calls) {
    if (call.peer != kAllRanks && !is_exchange(call)) write_stages_once(*call.comm, call.type);
  }
  for (DeferredCall& call : calls) {
    if (call.to) receive_deferred(call);
  }
  calls.clear();
  return ncclSuccess;
}

}  // namespace

bool defer_to_group_end(const DeferredCall& call) {
  if (!is_in_group() || !is_single_rank()) return false;
  deferred().push_back(call);
  at_group_end(GroupTask::messages, finish_calls);
  return true;
}

void write_stages_once(ncclComm& comm, ncclDataType_t type) {
  if (!is_single_rank() || comm.has_stages || may_be_object(type)) return;
  comm.has_stages = true;
  write_stages(comm.ranks);
}

}  // namespace oomdiag
