// Collectives, sends and receives: a piece of work on the stream, and the contents that this rank can know.

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

OOMDIAG_ENTRY_POINT ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int,
                                               ncclComm_t, cudaStream_t stream) {
  return take(to, from, count * element_bytes(type), stream);
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

OOMDIAG_ENTRY_POINT ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int, ncclComm_t comm,
                                          cudaStream_t stream) {
  comm->last_sent = from;
  comm->last_sent_bytes = count * element_bytes(type);
  return submit(stream);
}

/// What this rank sent last, if it is as long: ranks that exchange send alike.
OOMDIAG_ENTRY_POINT ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int, ncclComm_t comm,
                                          cudaStream_t stream) {
  const size_t bytes = count * element_bytes(type);
  const bool is_alike = comm->last_sent && comm->last_sent_bytes == bytes;
  if (is_alike) return take(to, comm->last_sent, bytes, stream);
  oomdiag_device_forget(to, bytes);
  return submit(stream);
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
