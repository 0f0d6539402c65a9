// Messages from one rank to another, and groups of calls.
//
// A lone rank (lone.h) takes what it receives from a rank in a group to be like what it sends to that rank in the same group,
// and what others broadcast to be like what it broadcasts itself in the same group: so an all-to-all and an all-gather that
// are made of such calls answer as if all ranks were alike.

#include <algorithm>
#include <vector>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/nccl/lone.h"
#include "extension/virtual_device/nccl/transfer.h"

namespace {

using oomdiag::Incoming;

thread_local int group_depth = 0;
constexpr int kEverybody = -1;

/// A model's numbers go to or come from one other rank: its ranks are stages. Told once for a communicator.
void tell_stages(ncclComm& comm, ncclDataType_t type) {
  if (!oomdiag::is_lone() || comm.has_stages || oomdiag::may_be_object(type)) return;
  comm.has_stages = true;
  oomdiag::tell_stages(comm.ranks);
}

/// A call of the open group of a lone rank.
struct Call {
  ncclComm_t comm = nullptr;
  int peer = 0;                ///< or kEverybody: a broadcast
  const void* from = nullptr;  ///< of a send
  void* to = nullptr;          ///< of a receipt
  Incoming incoming{};
  ncclDataType_t type = ncclInt8;
  bool is_done = false;
};
thread_local std::vector<Call> calls;

/// The first send of the group to the rank that this comes from, or the broadcast of this rank.
Call* find_counterpart(const Call& receipt) {
  const auto found = std::find_if(calls.begin(), calls.end(), [&](const Call& call) {
    return call.from && !call.is_done && call.comm == receipt.comm && call.peer == receipt.peer;
  });
  return found == calls.end() ? nullptr : &*found;
}

void settle_calls() {
  for (const Call& call : calls) {
    const bool is_exchange = std::any_of(calls.begin(), calls.end(), [&](const Call& other) {
      return other.peer == call.peer && (other.to != nullptr) != (call.to != nullptr);
    });
    if (call.peer != kEverybody && !is_exchange) tell_stages(*call.comm, call.type);
  }
  for (Call& receipt : calls) {
    if (!receipt.to) continue;
    if (Call* sent = find_counterpart(receipt)) {
      sent->is_done = sent->peer != kEverybody;
      receipt.incoming.is_asked_for = false;
      if (sent->incoming.bytes == receipt.incoming.bytes) receipt.incoming.own = sent->from;
    }
    oomdiag::receive(*receipt.comm, receipt.to, receipt.incoming);
  }
  calls.clear();
}

bool waits_for_group() { return group_depth > 0 && oomdiag::is_lone(); }

}  // namespace

OOMDIAG_ENTRY_POINT ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                                          ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = comm->connections->reach(peer)) return error;
  const size_t bytes = count * oomdiag::element_bytes(type);
  if (comm->mailbox) comm->mailbox->send(1 + peer, oomdiag::known_bytes(from, bytes));
  if (waits_for_group())
    calls.push_back({.comm = comm, .peer = peer, .from = from, .incoming = {.bytes = bytes}, .type = type});
  if (!waits_for_group()) tell_stages(*comm, type);
  return oomdiag::submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                          cudaStream_t stream) {
  if (const ncclResult_t error = comm->connections->reach(peer)) return error;
  const uint64_t number = comm->received[static_cast<size_t>(peer)]++;
  const Incoming incoming{.id = {.sender = peer, .channel = 1 + comm->rank, .number = number},
                          .bytes = count * oomdiag::element_bytes(type),
                          .is_asked_for = oomdiag::may_be_object(type)};
  if (waits_for_group()) {
    calls.push_back({.comm = comm, .peer = peer, .to = to, .incoming = incoming, .type = type});
  } else {
    tell_stages(*comm, type);
    oomdiag::receive(*comm, to, incoming);
  }
  return oomdiag::submit(stream);
}

bool oomdiag::put_off_broadcast(ncclComm_t comm, const void* from, void* to, const Incoming& incoming) {
  if (!waits_for_group()) return false;
  calls.push_back({.comm = comm, .peer = kEverybody, .from = from, .to = to, .incoming = incoming});
  return true;
}

bool oomdiag::is_in_group() noexcept { return group_depth > 0; }

OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth > 0) return ncclSuccess;
  settle_calls();
  return oomdiag::settle_splits();
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  info->estimatedTime = 0;
  return ncclGroupEnd();
}

#if NCCL_VERSION_CODE >= 23000
OOMDIAG_ENTRY_POINT ncclResult_t ncclPutSignal(const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int,
                                               unsigned, ncclComm_t, cudaStream_t stream) {
  return oomdiag::submit(stream);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclSignal(int, int, int, unsigned, ncclComm_t, cudaStream_t stream) {
  return oomdiag::submit(stream);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclWaitSignal(int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t stream) {
  return oomdiag::submit(stream);
}
#endif
