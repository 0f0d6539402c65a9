// Collectives: a piece of work on the stream, and the contents that can be known (mailbox.h).

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/mailbox.h"
#include "extension/virtual_device/nccl/single_rank/deferred_calls.h"
#include "extension/virtual_device/nccl/single_rank/job.h"
#include "extension/virtual_device/nccl/transfer.h"

using oomdiag::Collective;
using oomdiag::element_bytes;
using oomdiag::join;
using oomdiag::submit;

namespace {

/// `index` blocks of `bytes` further on.
void* at(void* buffer, int index, size_t bytes) {
  return static_cast<char*>(buffer) + static_cast<size_t>(index) * bytes;
}
const void* at(const void* buffer, int index, size_t bytes) {
  return static_cast<const char*>(buffer) + static_cast<size_t>(index) * bytes;
}

/// Sends what others need of this rank, if anything. Returns the number of the collective.
uint64_t take_part(const ncclComm& comm, const void* from = nullptr, size_t bytes = 0) {
  if (!comm.mailbox) return 0;
  const uint64_t number = comm.mailbox->next(0);
  comm.mailbox->send(0, oomdiag::known_bytes(from, bytes));
  return number;
}

/// Collective number `number`, in which every rank sent `bytes` and this one takes them all, in the order of their ranks.
void gather(const ncclComm& comm, const void* from, void* to, size_t bytes, uint64_t number) {
  if (comm.is_count_guessed) return oomdiag_device_forget_whole(to);  // how much of it is not known
  for (int rank = 0; rank < comm.count; ++rank) {
    void* place = at(to, rank, bytes);
    if (rank != comm.rank) {
      oomdiag::receive(comm, place, {.id = {.sender = rank, .number = number}, .bytes = bytes, .own = from});
    } else if (place != from) {
      oomdiag_device_copy(place, from, bytes);
    }
  }
}

ncclResult_t take(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  if (to != from) oomdiag_device_copy(to, from, bytes);
  return submit(stream);
}

}  // namespace

OOMDIAG_ENTRY_POINT ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                                               ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = join(comm, Collective::all_reduce)) return error;
  take_part(*comm);
  return take(to, from, count * element_bytes(type), stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                                            int root, ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = join(comm, Collective::other, root)) return error;
  take_part(*comm);
  return comm->rank == root ? take(to, from, count * element_bytes(type), stream) : submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                                   ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = join(comm, Collective::reduction_or_gathering)) return error;
  take_part(*comm);
  const size_t bytes = count * element_bytes(type);
  return take(to, at(from, comm->rank, bytes), bytes, stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                               ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = join(comm, Collective::other, root)) return error;
  const size_t bytes = count * element_bytes(type);
  if (comm->rank == root) {
    take_part(*comm, from, bytes);
    const ncclResult_t result = take(to, from, bytes, stream);
    oomdiag::defer_to_group_end({.comm = comm, .peer = oomdiag::kAllRanks, .from = to, .incoming = {.bytes = bytes}});
    return result;
  }
  const oomdiag::Incoming incoming{
      .id = {.sender = root, .number = take_part(*comm)}, .bytes = bytes, .is_asked_for = oomdiag::may_be_object(type)};
  const bool is_answered =
      oomdiag::is_single_rank() && !oomdiag::hands_objects_over() && oomdiag_device_knows(from, bytes);
  if (is_answered) return take(to, from, bytes, stream);
  const bool is_deferred =
      oomdiag::defer_to_group_end({.comm = comm, .peer = oomdiag::kAllRanks, .to = to, .incoming = incoming});
  if (!is_deferred) oomdiag::receive(*comm, to, incoming);
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                           cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                                               ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = join(comm, Collective::reduction_or_gathering)) return error;
  const size_t bytes = count * element_bytes(type);
  gather(*comm, from, to, bytes, take_part(*comm, from, bytes));
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                            ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = join(comm, Collective::other, root)) return error;
  const size_t bytes = count * element_bytes(type);
  const uint64_t number = take_part(*comm, from, bytes);
  if (comm->rank == root) gather(*comm, from, to, bytes, number);
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclScatter(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                             ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = join(comm, Collective::other, root)) return error;
  const size_t bytes = count * element_bytes(type);
  if (comm->rank == root) {
    take_part(*comm, from, bytes * static_cast<size_t>(comm->count));
    return take(to, at(from, root, bytes), bytes, stream);
  }
  const oomdiag::MessageId id{.sender = root, .number = take_part(*comm)};
  oomdiag::receive(*comm, to,
                   {.id = id,
                    .offset = bytes * static_cast<size_t>(comm->rank),
                    .bytes = bytes,
                    .is_asked_for = oomdiag::may_be_object(type)});
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                                              ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t error = oomdiag::reach_all(comm)) return error;
  const size_t bytes = count * element_bytes(type);
  const uint64_t number = take_part(*comm, from, bytes * static_cast<size_t>(comm->count));
  if (comm->is_count_guessed) oomdiag_device_forget_whole(to);
  for (int rank = 0; rank < comm->count && !comm->is_count_guessed; ++rank) {
    if (rank == comm->rank) {
      oomdiag_device_copy(at(to, rank, bytes), at(from, rank, bytes), bytes);
    } else {
      oomdiag::receive(*comm, at(to, rank, bytes),
                       {.id = {.sender = rank, .number = number},
                        .offset = bytes * static_cast<size_t>(comm->rank),
                        .bytes = bytes,
                        .own = at(from, rank, bytes)});
    }
  }
  return submit(stream);
}
