// Messages from one rank to another.

#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/nccl/single_rank/deferred_calls.h"
#include "extension/virtual_device/nccl/transfer.h"

OOMDIAG_ENTRY_POINT ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                                          ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = oomdiag::reach(comm, peer)) return error;
  const size_t bytes = count * oomdiag::element_bytes(type);
  if (comm->mailbox) comm->mailbox->send(1 + peer, oomdiag::known_bytes(from, bytes));
  const bool is_deferred = oomdiag::defer_to_group_end(
      {.comm = comm, .peer = peer, .from = from, .incoming = {.bytes = bytes}, .type = type});
  if (!is_deferred) oomdiag::write_stages_once(*comm, type);
  return oomdiag::submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                          cudaStream_t stream) {
  if (const ncclResult_t error = oomdiag::reach(comm, peer)) return error;
  const uint64_t number = comm->received[static_cast<size_t>(peer)]++;
  const oomdiag::Incoming incoming{.id = {.sender = peer, .channel = 1 + comm->rank, .number = number},
                                   .bytes = count * oomdiag::element_bytes(type),
                                   .is_asked_for = oomdiag::may_be_object(type)};
  if (!oomdiag::defer_to_group_end({.comm = comm, .peer = peer, .to = to, .incoming = incoming, .type = type})) {
    oomdiag::write_stages_once(*comm, type);
    oomdiag::receive(*comm, to, incoming);
  }
  return oomdiag::submit(stream);
}
