// Collectives, sends and receives: a piece of work on the stream, and the contents that can be known (mailbox.h).

#include <cstring>
#include <memory>
#include <vector>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/nccl/communicator.h"

namespace {

size_t element_bytes(ncclDataType_t type) {
  switch (static_cast<int>(type)) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

/// `index` blocks of `bytes` further on.
void* at(void* buffer, int index, size_t bytes) {
  return static_cast<char*>(buffer) + static_cast<size_t>(index) * bytes;
}
const void* at(const void* buffer, int index, size_t bytes) {
  return static_cast<const char*>(buffer) + static_cast<size_t>(index) * bytes;
}

ncclResult_t submit(cudaStream_t stream) {
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_KERNEL) ? ncclUnhandledCudaError : ncclSuccess;
}

thread_local int group_depth = 0;

/// What comes from another rank, and what is taken in its place where that is not known: what this rank has itself.
struct Delivery {
  std::shared_ptr<oomdiag::Mailbox::Reader> reader;
  oomdiag::MessageId id;
  size_t offset = 0;
  size_t bytes = 0;
  std::vector<char> own{};
};

bool fetch(void* context, void* into) {
  const Delivery& delivery = *static_cast<Delivery*>(context);
  if (delivery.reader->read(delivery.id, delivery.offset, into, delivery.bytes)) return true;
  if (delivery.own.size() == delivery.bytes) std::memcpy(into, delivery.own.data(), delivery.bytes);
  return delivery.own.size() == delivery.bytes;
}

/// The contents of a small buffer as far as the host wrote all of it, else nothing.
std::vector<char> known_bytes(const void* from, size_t bytes) {
  if (bytes == 0 || bytes > oomdiag::kMostMessageBytes) return {};
  std::vector<char> found(bytes);
  if (!oomdiag_device_peek(found.data(), from, bytes)) found.clear();
  return found;
}

/// `bytes` from `offset` on of a message come to `to`; `own`, if any, is this rank's counterpart of them.
void receive(const ncclComm& comm, void* to, size_t bytes, const oomdiag::MessageId& id, size_t offset = 0,
             const void* own = nullptr) {
  if (!comm.mailbox || bytes > oomdiag::kMostMessageBytes) {
    if (own) {
      oomdiag_device_copy(to, own, bytes);
    } else {
      oomdiag_device_forget(to, bytes);
    }
    return;
  }
  auto delivery = std::make_unique<Delivery>(
      Delivery{.reader = comm.mailbox->reader(), .id = id, .offset = offset, .bytes = bytes});
  if (own) delivery->own = known_bytes(own, bytes);
  const auto release = [](void* context) { delete static_cast<Delivery*>(context); };
  oomdiag_device_promise(to, bytes, fetch, release, delivery.release());
}

/// Takes part in a collective: sends what others need of this rank, if anything. Returns the number of the collective.
uint64_t take_part(const ncclComm& comm, const void* from = nullptr, size_t bytes = 0) {
  if (!comm.mailbox) return 0;
  const uint64_t number = comm.mailbox->next(0);
  comm.mailbox->send(0, known_bytes(from, bytes));
  return number;
}

/// Collective number `number`, in which every rank sent `bytes` and this one takes them all, in the order of their ranks.
void gather(const ncclComm& comm, const void* from, void* to, size_t bytes, uint64_t number) {
  for (int rank = 0; rank < comm.count; ++rank) {
    void* place = at(to, rank, bytes);
    if (rank != comm.rank) {
      receive(comm, place, bytes, {.sender = rank, .number = number}, 0, from);
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
  take_part(*comm);
  return take(to, from, count * element_bytes(type), stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                                            int root, ncclComm_t comm, cudaStream_t stream) {
  take_part(*comm);
  return comm->rank == root ? take(to, from, count * element_bytes(type), stream) : submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                                   ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  take_part(*comm);
  const size_t bytes = count * element_bytes(type);
  return take(to, at(from, comm->rank, bytes), bytes, stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                               ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  if (comm->rank == root) {
    take_part(*comm, from, bytes);
    return take(to, from, bytes, stream);
  }
  receive(*comm, to, bytes, {.sender = root, .number = take_part(*comm)});
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                           cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                                               ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  gather(*comm, from, to, bytes, take_part(*comm, from, bytes));
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                            ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  const uint64_t number = take_part(*comm, from, bytes);
  if (comm->rank == root) gather(*comm, from, to, bytes, number);
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclScatter(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                             ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  if (comm->rank == root) {
    take_part(*comm, from, bytes * static_cast<size_t>(comm->count));
    return take(to, at(from, root, bytes), bytes, stream);
  }
  const oomdiag::MessageId id{.sender = root, .number = take_part(*comm)};
  receive(*comm, to, bytes, id, bytes * static_cast<size_t>(comm->rank));
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                                              ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  const uint64_t number = take_part(*comm, from, bytes * static_cast<size_t>(comm->count));
  for (int rank = 0; rank < comm->count; ++rank) {
    if (rank == comm->rank) {
      oomdiag_device_copy(at(to, rank, bytes), at(from, rank, bytes), bytes);
    } else {
      const oomdiag::MessageId id{.sender = rank, .number = number};
      receive(*comm, at(to, rank, bytes), bytes, id, bytes * static_cast<size_t>(comm->rank), at(from, rank, bytes));
    }
  }
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                                          ncclComm_t comm, cudaStream_t stream) {
  if (comm->mailbox) comm->mailbox->send(1 + peer, known_bytes(from, count * element_bytes(type)));
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                          cudaStream_t stream) {
  const uint64_t number = comm->received[static_cast<size_t>(peer)]++;
  receive(*comm, to, count * element_bytes(type), {.sender = peer, .channel = 1 + comm->rank, .number = number});
  return submit(stream);
}

bool oomdiag::is_in_group() noexcept { return group_depth > 0; }

OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return ncclInvalidUsage;
  --group_depth;
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  info->estimatedTime = 0;
  return ncclGroupEnd();
}

#if NCCL_VERSION_CODE >= 23000
OOMDIAG_ENTRY_POINT ncclResult_t ncclPutSignal(const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int,
                                               unsigned, ncclComm_t, cudaStream_t stream) {
  return submit(stream);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclSignal(int, int, int, unsigned, ncclComm_t, cudaStream_t stream) {
  return submit(stream);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclWaitSignal(int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t stream) {
  return submit(stream);
}
#endif
