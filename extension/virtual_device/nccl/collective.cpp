// Collectives, sends and receives: a piece of work on the stream, and the contents that this rank can know.
//
// What belongs together comes in a group: PyTorch gathers into a list of tensors by one broadcast from each rank, and
// exchanges by pairs of sends and receives. So at the end of a group what others would have broadcast is taken from what
// this rank did, and the first receive from the first send, and so on.

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

struct Piece {
  void* address = nullptr;
  size_t bytes = 0;
};

/// What was asked for in the open group, or in a call outside of any.
struct Group {
  int depth = 0;
  Piece own_broadcast;
  std::vector<Piece> foreign_broadcasts;
  std::vector<Piece> sends;
  std::vector<Piece> receives;
};
thread_local Group group;

void receive(const Piece& to, const Piece& from) {
  const size_t bytes = to.bytes < from.bytes ? to.bytes : from.bytes;
  if (bytes && to.address != from.address) oomdiag_device_copy(to.address, from.address, bytes);
  oomdiag_device_forget(static_cast<char*>(to.address) + bytes, to.bytes - bytes);
}

void finish_group() {
  if (group.depth > 0) return;
  for (const Piece& foreign : group.foreign_broadcasts) {
    if (group.own_broadcast.bytes) receive(foreign, group.own_broadcast);
  }
  for (size_t i = 0; i < group.receives.size(); ++i) {
    receive(group.receives[i], i < group.sends.size() ? group.sends[i] : Piece{});
  }
  group = {};
}

ncclResult_t take(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  if (to != from) oomdiag_device_copy(to, from, bytes);
  return submit(stream);
}

}  // namespace

OOMDIAG_ENTRY_POINT ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                                               ncclRedOp_t, ncclComm_t, cudaStream_t stream) {
  return take(to, from, count * element_bytes(type), stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                                            int root, ncclComm_t comm, cudaStream_t stream) {
  return comm->rank == root ? take(to, from, count * element_bytes(type), stream) : submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                               ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  if (comm->rank != root) {
    group.foreign_broadcasts.push_back({to, bytes});
    finish_group();
    return submit(stream);
  }
  group.own_broadcast = {const_cast<void*>(from), bytes};
  finish_group();
  return take(to, from, bytes, stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclBcast(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t stream) {
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                                   ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  return take(to, at(from, comm->rank, bytes), bytes, stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                                               ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  for (int rank = 0; rank < comm->count; ++rank) {
    if (at(to, rank, bytes) != from) oomdiag_device_copy(at(to, rank, bytes), from, bytes);
  }
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                                              ncclComm_t comm, cudaStream_t stream) {
  return take(to, from, count * element_bytes(type) * static_cast<size_t>(comm->count), stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                            ncclComm_t comm, cudaStream_t stream) {
  return comm->rank == root ? ncclAllGather(from, to, count, type, comm, stream) : submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclScatter(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                             ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  return comm->rank == root ? take(to, at(from, root, bytes), bytes, stream) : submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int, ncclComm_t,
                                          cudaStream_t stream) {
  group.sends.push_back({const_cast<void*>(from), count * element_bytes(type)});
  finish_group();
  return submit(stream);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int, ncclComm_t,
                                          cudaStream_t stream) {
  group.receives.push_back({to, count * element_bytes(type)});
  finish_group();
  return submit(stream);
}

bool oomdiag::is_in_group() noexcept { return group.depth > 0; }

OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return ncclInvalidUsage;
  --group.depth;
  finish_group();
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
